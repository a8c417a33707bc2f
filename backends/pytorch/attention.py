"""Attention by torch's fused kernels for CUDA and ROCm: one launch each way.

Without a kernel for the shapes, dtype or card, the operator's formula computes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda

from hetpipe.sdk.operators.attention import (
    four_dimensions,
    plain_attention,
    plain_attention_backward,
)
from hetpipe.sdk.operators.masked_attention import (
    plain_masked_attention,
    plain_masked_attention_backward,
)

from .memory import strided

aten = torch.ops.aten

_ROWS = 32
"""The logarithms of torch's efficient kernel are padded to a multiple of this number."""
_COLUMNS = 16
"""Rows of the efficient kernel's bias begin at multiples of this number of elements."""


@strided
def attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `hetpipe.attention`."""
    q, k, v = four_dimensions(query, key, value)
    if _has_flash(q, k, v, is_causal):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, is_causal, False, scale=scale
        )
    elif _has_efficient(q, k, v, is_causal):
        out, logsumexp = _efficient(q, k, v, None, is_causal, scale)
    else:
        return plain_attention(query, key, value, is_causal, scale)
    return (out, logsumexp) if query.ndim == 4 else (out.squeeze(1), logsumexp.squeeze(1))


@strided
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.attention_backward` by the kernel that `attention` called."""
    grad, q, k, v, o = four_dimensions(grad_out, query, key, value, out)
    sums = logsumexp if query.ndim == 4 else logsumexp.unsqueeze(1)
    gradients: Any
    if _has_flash(q, k, v, is_causal):
        # Without dropout, no kernel reads the state of random numbers.
        random = (q.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, o, sums.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, is_causal,
            *random, scale=scale,
        )  # fmt: skip
    elif _has_efficient(q, k, v, is_causal):
        gradients = _efficient_backward([grad, q, k, v, o], None, sums, is_causal, scale)
    else:
        return plain_attention_backward(
            grad_out, query, key, value, out, logsumexp, is_causal, scale
        )
    return tuple(x if query.ndim == 4 else x.squeeze(1) for x in gradients)


@strided
def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `hetpipe.masked_attention`."""
    q, k, v = four_dimensions(query, key, value)
    aligned = _aligned(bias, q, k)
    if not _has_efficient(q, k, v, False, aligned):
        return plain_masked_attention(query, key, value, bias, scale)
    return _efficient(q, k, v, aligned, False, scale)


@strided
def masked_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, ...]:
    """Compute `hetpipe.masked_attention_backward` by the kernel that the forward called."""
    grad, q, k, v, o = four_dimensions(grad_out, query, key, value, out)
    aligned = _aligned(bias, q, k)
    if not _has_efficient(q, k, v, False, aligned):
        return plain_masked_attention_backward(
            grad_out, query, key, value, bias, out, logsumexp, scale
        )
    return _efficient_backward([grad, q, k, v, o], aligned, logsumexp, False, scale)


def _has_flash(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Return whether torch's flash kernel computes this attention."""
    if query.is_meta:
        return query.dtype.itemsize == 2 and query.shape[-1] == value.shape[-1]
    return cuda.can_use_flash_attention(_parameters(query, key, value, is_causal))


def _has_efficient(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, bias: Tensor | None = None
) -> bool:
    """Return whether torch's memory-efficient kernel computes this attention."""
    if query.is_meta:
        return query.dtype.itemsize <= 4
    return cuda.can_use_efficient_attention(_parameters(query, key, value, is_causal, bias))


def _parameters(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, bias: Tensor | None = None
) -> cuda.SDPAParams:
    return cuda.SDPAParams(query, key, value, bias, 0.0, is_causal, False)


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out, logsumexp) by the memory-efficient kernel."""
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, 0.0, is_causal, scale=scale
    )
    return out, logsumexp[..., : query.shape[2]]


def _efficient_backward(
    operands: list[Tensor], bias: Tensor | None, sums: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value; `operands` also has grad_out and out."""
    grad, query, key, value, out = operands
    # Without dropout, no kernel reads the state of random numbers.
    random = (query.new_empty((), dtype=torch.int64) for _ in range(2))
    which = [True, True, True, False]
    *gradients, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, bias, out, _padded(sums), *random, 0.0, which, is_causal,
        scale=scale,
    )  # fmt: skip
    return tuple(gradients)


def _aligned(bias: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a bias for every row of scores, in memory that the efficient kernel can read."""
    missing = -bias.shape[-1] % _COLUMNS
    wide = torch.nn.functional.pad(bias, (0, missing)) if missing else bias.contiguous()
    return wide[..., : bias.shape[-1]].expand(*query.shape[:3], key.shape[2])


def _padded(sums: Tensor) -> Tensor:
    """Pad the logarithms as CUDA's kernel wrote them; ROCm's kernel does not pad."""
    missing = 0 if torch.version.hip else -sums.shape[-1] % _ROWS
    sums = sums.contiguous()
    return torch.nn.functional.pad(sums, (0, missing), value=float("inf")) if missing else sums
