"""Windows that slide along a dimension, as reads by index.

torch's own decomposition takes `as_strided`, whose strides are those of the tensor in torch's
memory: of a slice, or with channels last, they are not the ones here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    """All windows of `size` elements, `step` apart, in a new last dimension."""
    if x.dim() == 0:
        return x.expand(1)[:size]
    dim %= x.dim()
    count = (x.shape[dim] - size) // step + 1
    first = torch.arange(count, device=x.device) * step
    place = first.unsqueeze(1) + torch.arange(size, device=x.device)
    taken = x.movedim(dim, -1).index_select(-1, place.reshape(-1))
    return taken.reshape(*taken.shape[:-1], count, size).movedim(-2, dim)


WINDOWS: Mapping[Any, Callable[..., Any]] = {aten.unfold.default: unfold}
"""Decompositions by operator."""
