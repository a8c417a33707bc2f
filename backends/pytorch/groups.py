"""Groups of cards that sum tensors by NCCL, or by RCCL, which torch calls NCCL too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hetpipe.sdk.backend import Buffer, Event, Group

from .device import TorchBuffer
from .lanes import Lane, StreamEvent

if TYPE_CHECKING:
    from .streams import StreamDevice

SMALL_NBYTES = 1 << 20
"""Smaller tensors are summed together, because a launch of NCCL takes some 10 us. An estimate."""


class CardGroup(Group):
    """A group whose cards sum a list of tensors in place by `all_reduce`, on the current stream."""

    def __init__(
        self, device: StreamDevice, all_reduce: Callable[[list[torch.Tensor]], None]
    ) -> None:
        self._device = device
        self._all_reduce = all_reduce
        self._lane = Lane(device.module, device.torch_device, f"{device.info.id} sums")

    def sum(self, terms: Sequence[Buffer], scale: float) -> tuple[list[Buffer], Event]:
        device, lane = self._device, self._lane
        own = [device.own(term) for term in terms]
        tensors = [buffer.tensor for buffer in own]
        with (
            device.blamed(f"summing {len(own)} tensors over cards"),
            device.module.stream(lane.stream),
            torch.inference_mode(),
        ):
            if scale != 1.0:
                torch._foreach_mul_(tensors, scale)
            self._sum(tensors)
            for tensor in tensors:
                device.keep_for(tensor, lane)
            results: list[Buffer] = [
                TorchBuffer(device, buffer.tensor, buffer.shape, buffer.dtype) for buffer in own
            ]
            return results, StreamEvent(device.info.id, lane)

    def _sum(self, tensors: Sequence[torch.Tensor]) -> None:
        small = defaultdict[torch.dtype, list[torch.Tensor]](list)
        for tensor in tensors:
            if tensor.nbytes < SMALL_NBYTES:
                small[tensor.dtype].append(tensor)
        joined = [torch.cat([tensor.flatten() for tensor in some]) for some in small.values()]
        self._all_reduce([*joined, *(t for t in tensors if t.nbytes >= SMALL_NBYTES)])
        for whole, some in zip(joined, small.values(), strict=True):
            parts = whole.split_with_sizes([tensor.numel() for tensor in some])
            torch._foreach_copy_(
                some, [part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True)]
            )


def nccl_all_reduce(
    device: torch.device, folder: Path, rank: int, size: int
) -> Callable[[list[torch.Tensor]], None]:
    """Return a function that sums tensors in place over `size` cards, once all have joined.

    torch never frees the communicator, which takes some memory of the card.
    """
    nccl: Any = import_module("torch.cuda.nccl")  # without types
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its __all__

    store = FileStore(str(folder / "store"), size)
    if rank == 0:
        store.set("id", nccl.unique_id())
    with torch.cuda.device(device):
        communicator = nccl.init_rank(size, store.get("id"), rank)

    def all_reduce(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            nccl.all_reduce([tensor], comms=[communicator])

    return all_reduce
