"""Decompositions that suit OpenCL kernels better than core ATen's decompositions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from hetpipe.sdk.decompositions import VOLUME_CONVOLUTIONS, fallback_decompositions
from hetpipe.sdk.decompositions.indexing import scatter_mean
from hetpipe.sdk.graph import core_decompositions

from .lower.registry import LOWERINGS

aten = torch.ops.aten
FLOAT32_KERNELS = (
    aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default, aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default, aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats, aten.native_batch_norm_backward.default,
    aten._native_batch_norm_legit_no_training.default,
)  # fmt: skip
"""Operators whose kernels are for float32 only. torch can decompose these operators."""


def decompositions(kept: Collection[str]) -> Mapping[Any, Callable[..., Any]]:
    """Return the decompositions by operator; `kept` names the operators that have a kernel."""
    from torch._decomp import get_decompositions

    table = {**core_decompositions(), **fallback_decompositions(keep=LOWERINGS), **BESIDE_LOWERINGS}
    found = get_decompositions(FLOAT32_KERNELS)
    return {
        **{op: fn for op, fn in table.items() if str(op) not in kept},
        **{op: partial(beside_kernel, found[op]) for op in FLOAT32_KERNELS if op in found},
        **VOLUME_CONVOLUTIONS,
    }


def beside_kernel(decomposition: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Decompose calls with float64 tensors or an empty first input; leave others to the kernel."""
    tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if args[0].numel() and all(tensor.dtype != torch.float64 for tensor in tensors):
        return NotImplemented
    return decomposition(*args, **kwargs)


def gelu_backward(dy: torch.Tensor, x: torch.Tensor, *, approximate: str = "none") -> Any:
    """Return dy times the derivative of gelu, written with the terms of gelu's kernel.

    So a forward that saves the derivative computes the error function or the exponential only once.
    The approximated gelu is x p with p = (1 + tanh(u)) / 2, the logistic function of 2 u.
    """
    if approximate != "none":
        scale, cubic = math.sqrt(2 / math.pi), 0.044715
        square = x * x
        p = 1 / (1 + torch.exp(-2 * scale * (x + cubic * (square * x))))
        slope = 2 * scale * (1 + 3 * cubic * square)
        return dy * (p + x * slope * (p * (1 - p)))
    root = x * math.sqrt(0.5)
    density = torch.exp(-(root * root)) * (1 / math.sqrt(2 * math.pi))
    return dy * ((torch.erf(root) + 1) * 0.5 + x * density)


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * (1 / (1 + torch.exp(-x)))


BESIDE_LOWERINGS: Mapping[Any, Callable[..., Any]] = {
    aten.gelu_backward.default: gelu_backward,  # has the same terms as the forward
    aten.silu.default: silu,
    aten.scatter_reduce.two: scatter_mean,  # the other reductions have a kernel
}
"""Decompositions to use in addition to the lowerings."""
