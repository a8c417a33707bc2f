"""What is decomposed before the cut: operators whose derivative is missing or one device's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hetpipe.errors import CaptureError
from hetpipe.sdk.graph import core_decompositions

aten = torch.ops.aten


def before_cut() -> dict[Any, Callable[..., Any]]:
    """The table for `ExportedProgram.run_decompositions`: as little as possible."""
    core = core_decompositions()
    recurrent = (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten.copy.default: copy,
        aten.as_strided.default: as_strided,
        **{operator: core[operator] for operator in recurrent},
    }


def copy(into: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `x[:, 0] = source` becomes; the operator itself has no derivative."""
    return source.to(into.dtype).expand(into.shape)


def as_strided(
    x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> torch.Tensor:
    """The same elements by index: graphs have no strides."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise CaptureError(
            "as_strided on a tensor that is not row-major; call contiguous() before it, or use "
            "slicing and permute"
        )
    index = torch.full((), offset or 0, dtype=torch.int64)
    for extent, step in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(extent) * step
    return x.reshape(-1).index_select(0, index.reshape(-1)).reshape(size)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, by its documented definition."""
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        attn_mask = torch.ones(size, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = scores.softmax(-1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    return weights @ value
