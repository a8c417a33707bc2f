"""Operators whose kernels are float32 alone, decomposed where they get other numbers, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from .volumes import CONVOLUTIONS

aten = torch.ops.aten
KERNELS = (
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit_no_training.default,
)  # fmt: skip
"""Operators with a kernel of float32 that torch can decompose."""


def beside_kernels() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions that leave to a kernel what it takes."""
    from torch._decomp import get_decompositions

    table = {op: partial(_elsewhere, fn) for op, fn in get_decompositions(KERNELS).items()}
    return {**{op: table[op] for op in KERNELS if op in table}, **CONVOLUTIONS}


def _elsewhere(decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    first = args[0]
    if first.numel() and all(each.dtype != torch.float64 for each in _tensors(args)):
        return NotImplemented
    return decomposition(*args, **kwargs)


def _tensors(args: Any) -> list[torch.Tensor]:
    return [each for each in args if isinstance(each, torch.Tensor)]
