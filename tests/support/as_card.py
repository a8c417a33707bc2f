"""torch's CPU as a simulated accelerator with streams that defer, to test `StreamDevice`.

A script that imports this module may run `hetpipe conform as-card` by `hetpipe.cli.main`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deferred import Card, Module
from hetpipe.backends.pytorch import PyTorchBackend
from hetpipe.backends.pytorch.device import TorchDevice
from hetpipe.backends.pytorch.lanes import Lane
from hetpipe.backends.pytorch.streams import StreamDevice
from torch.utils._python_dispatch import _disable_current_modes

from hetpipe.sdk import Capabilities, DeviceInfo, register_backend


class CardDevice(StreamDevice):
    """A `StreamDevice` on a simulated card."""

    module: Module
    staged = 0
    """Copies through memory that is neither the caller's nor the card's."""

    def pinned(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        assert self.module.card.stream is not None, "pinned in another card's context"
        self.staged += 1
        with _disable_current_modes():  # the stream would take the memory from the card
            return torch.empty(shape, dtype=getattr(torch, dtype))

    def shared_memory(self, nbytes: int) -> tuple[torch.Tensor, bytes]:
        """Return memory in a file that processes share; the handle is its path."""
        number, path = tempfile.mkstemp(prefix="window-")
        os.close(number)
        memory = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        return memory, path.encode()

    def mapped_memory(self, handle: bytes, nbytes: int) -> torch.Tensor:
        return torch.from_file(handle.decode(), shared=True, size=nbytes, dtype=torch.uint8)

    def all_reduce(self, folder: Path, rank: int, size: int) -> Callable[[torch.Tensor], None]:
        """Return a function that queues sums in the stream; gloo makes them, not NCCL."""
        from torch.distributed import FileStore, ProcessGroupGloo

        group = ProcessGroupGloo(FileStore(str(folder / "store"), size), rank, size)

        def all_reduce(tensor: torch.Tensor) -> None:
            card = self.module.card
            assert card.stream is not None

            def work() -> None:
                with card.opened([tensor]):
                    group.allreduce([tensor]).wait()

            card.stream.put(work)

        return all_reduce

    def keep_for(self, tensor: torch.Tensor, lane: Lane) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef

        owners = self.module.card.owners.get(StorageWeakRef(tensor.untyped_storage()))
        if owners is not None:
            owners.add(lane.stream)


@register_backend
class AsCard(PyTorchBackend):
    """A card of 4 GiB."""

    name = "as-card"
    memory_nbytes = 4 << 30

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(
                info, kind="gpu", memory_nbytes=self.memory_nbytes, memory_domain="card:0",
                capabilities=Capabilities(),
                driver=torch.__version__ + self._options.changed("card"),
            )
            for info in super().discover()[:1]
        ]  # fmt: skip

    def open(self, info: DeviceInfo) -> TorchDevice:
        module: Any = Module(Card(self.memory_nbytes))
        return CardDevice(info, torch.device("cpu"), module, options=self._options)


class AsPeer(AsCard):
    """The same card, which copies messages directly into the memory of another such card."""

    name = "as-peer"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"peer_copies": True}, Path())


class AsSummed(AsCard):
    """Cards that sum tensors without the host; each process opens another card."""

    name = "as-summed"

    def __init__(self) -> None:
        super().__init__()
        self.configure({"nccl": True}, Path())

    def discover(self) -> list[DeviceInfo]:
        (card,) = super().discover()
        return [
            replace(card, id=f"{self.name}:cpu:{number}", memory_domain=f"card:{number}")
            for number in range(3)
        ]
