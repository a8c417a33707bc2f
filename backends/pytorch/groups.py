"""Sums of tensors over cards by NCCL, or by RCCL, which torch calls NCCL too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

AllReduce = Callable[[torch.Tensor], None]
"""Sums a tensor in place over all cards of a group, on the current stream."""

SMALL_NBYTES = 1 << 20
"""Smaller tensors are summed together, because a launch of NCCL takes some 10 us. An estimate."""


def nccl_all_reduce(device: torch.device, folder: Path, rank: int, size: int) -> AllReduce:
    """Return a function that sums over `size` cards, once all have joined in an empty folder.

    torch never frees the communicator, which takes some memory of the card.
    """
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # not in its __all__

    nccl: Any = import_module("torch.cuda.nccl")  # without types
    store = FileStore(str(folder / "store"), size)
    if rank == 0:
        store.set("id", nccl.unique_id())
    with torch.cuda.device(device):
        communicator = nccl.init_rank(size, store.get("id"), rank)
    return lambda tensor: nccl.all_reduce([tensor], comms=[communicator])


def sum_in_place(tensors: Sequence[torch.Tensor], scale: float, all_reduce: AllReduce) -> None:
    """Multiply tensors by `scale`, and sum them over the cards of a group."""
    if scale != 1.0:
        torch._foreach_mul_(list(tensors), scale)
    small = defaultdict[torch.dtype, list[torch.Tensor]](list)
    for tensor in tensors:
        if tensor.nbytes < SMALL_NBYTES:
            small[tensor.dtype].append(tensor)
        else:
            all_reduce(tensor)
    for some in small.values():
        joined = torch.cat([tensor.flatten() for tensor in some])
        all_reduce(joined)
        parts = joined.split_with_sizes([tensor.numel() for tensor in some])
        views = [part.view(tensor.shape) for part, tensor in zip(parts, some, strict=True)]
        torch._foreach_copy_(some, views)
