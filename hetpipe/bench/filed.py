"""Tensors in a temporary file, for activations that do not fit into memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from tempfile import TemporaryFile
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

LARGE_PARAMETERS = 250_000_000  # from this number on, a model's activations are saved to a file
LARGE_NBYTES = 1 << 20  # smaller activations stay in memory


class Filed(Mapping[str, torch.Tensor]):
    """Tensors by name in a temporary file; each access reads the tensor from the file."""

    def __init__(self) -> None:
        self._file = TemporaryFile()  # noqa: SIM115 - deleted with this object
        weakref.finalize(self, self._file.close)
        self._places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}

    def file(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor to the file; each name may be used once."""
        self._places[name] = self._file.seek(0, os.SEEK_END), tensor.shape, tensor.dtype
        self._file.write(_bytes(tensor.detach().contiguous()))

    def __getitem__(self, name: str) -> torch.Tensor:
        begin, shape, dtype = self._places[name]
        tensor = torch.empty(shape, dtype=dtype)
        self._file.seek(begin)
        self._file.readinto(_bytes(tensor))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def activations_filed(model: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which torch saves activations to a file, if the model is large."""
    parameters = list(model.parameters())
    if sum(parameter.numel() for parameter in parameters) < LARGE_PARAMETERS:
        return nullcontext()
    filed = Filed()
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def pack(tensor: torch.Tensor) -> torch.Tensor | str:
        if tensor.nbytes < LARGE_NBYTES or tensor.untyped_storage().data_ptr() in own:
            return tensor
        name = str(len(filed))
        filed.file(name, tensor)
        return name

    def unpack(packed: torch.Tensor | str) -> torch.Tensor:
        return filed[packed] if isinstance(packed, str) else packed

    return saved_tensors_hooks(pack, unpack)


def _bytes(tensor: torch.Tensor) -> Any:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
