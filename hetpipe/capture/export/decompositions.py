"""Before the cut, decomposes operators without a derivative, or with one for a single device only.

Batch norms are also decomposed if replicas share the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp import get_decompositions

from hetpipe.errors import CaptureError

aten = torch.ops.aten
own = torch.ops.hetpipe


def before_cut(sync_batch_norm: bool = False) -> dict[Any, Callable[..., Any]]:
    """Return the table for `ExportedProgram.run_decompositions`, as small as possible."""
    recurrent = (aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    unrolled = get_decompositions([aten.lstm.input, *recurrent])
    synchronised: dict[Any, Callable[..., Any]] = {
        aten._native_batch_norm_legit_functional.default: batch_norm,
        aten._native_batch_norm_legit.no_stats: batch_norm_without_memory,
    }
    return {
        aten.scaled_dot_product_attention.default: attention,
        aten.lstm.input: _unmixed(partial(lstm, projected=_unrolled(unrolled[aten.lstm.input]))),
        aten.copy.default: copy,
        aten.as_strided.default: as_strided,
        aten.adaptive_avg_pool1d.default: adaptive_avg_pool,
        aten.adaptive_avg_pool2d.default: adaptive_avg_pool,
        aten.adaptive_avg_pool3d.default: adaptive_avg_pool,
        **(synchronised if sync_batch_norm else {}),
        **{operator: _unmixed(_unrolled(unrolled[operator])) for operator in recurrent},
    }


def copy(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Decompose `aten.copy`, the operator of `x[:, 0] = source`, which has no derivative."""
    return source.to(into.dtype).expand(into.shape)


def as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Tensor:
    """Decompose `as_strided` into a read of elements by index, since graphs have no strides."""
    if not x.is_contiguous() or x.storage_offset() != 0:
        raise CaptureError(
            "as_strided on a tensor that is not row-major; call contiguous() before it, or use "
            "slicing and permute"
        )
    index = torch.full((), offset or 0, dtype=torch.int64)
    for extent, step in zip(size, stride, strict=True):
        index = index.unsqueeze(-1) + torch.arange(extent) * step
    return x.reshape(-1).index_select(0, index.reshape(-1)).reshape(size)


def adaptive_avg_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    """Decompose `adaptive_avg_pool1d`, `2d` and `3d` for any layout of `x`.

    torch's own mean over a whole image calls `as_strided` on a tensor in channels-last order.
    """
    if all(extent == 1 for extent in size):
        return x.mean([dim - len(size) for dim in range(len(size))], keepdim=True)
    if len(size) == 1:
        return adaptive_avg_pool(x.unsqueeze(-2), [1, *size]).squeeze(-2)
    pool = aten._adaptive_avg_pool2d if len(size) == 2 else aten._adaptive_avg_pool3d
    pooled: Tensor = pool(x, list(size))
    return pooled


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute `_native_batch_norm_legit_functional` with the statistics of all replicas' rows."""
    assert training, "in eval mode it is another operator"
    y, mean, rstd, variance, count = _normalize(x, weight, bias, eps)
    unbiased = variance * (count / (count - 1))
    running_mean = momentum * mean + (1 - momentum) * running_mean
    running_var = momentum * unbiased + (1 - momentum) * running_var
    return y, mean, rstd, running_mean, running_var


def batch_norm_without_memory(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """Compute `batch_norm` without running statistics: `_native_batch_norm_legit.no_stats`."""
    return _normalize(x, weight, bias, eps)[:3]


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, ...]:
    """Return (y, mean, rstd, variance, count), where y is the normalised x.

    y has the shape of x, and the statistics have shape (channels,). count, of shape (1,), is the
    number of elements per channel on all replicas. The variance is summed from squares of
    (x - mean), so no digits cancel. Only y has a gradient.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    channels, rows = x.shape[1], [0, *range(2, x.ndim)]
    per_channel = [1, channels, *[1] * (x.ndim - 2)]
    own_count = torch.full((1,), float(x.numel() // channels), dtype=wide.dtype)
    sums = own.replica_sum(torch.cat([wide.sum(rows), own_count]))
    total, count = sums[:channels], sums[channels:].detach()
    mean = total / count
    # The variance does not depend on the mean; only the shift below needs the mean's gradient.
    centred = wide - mean.detach().view(per_channel)
    variance = own.replica_sum((centred * centred).sum(rows)) / count
    scale = rstd = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight
    shift = (mean.detach() - mean) * scale.detach()
    if bias is not None:
        shift = shift + bias
    y = (centred * scale.view(per_channel) + shift.view(per_channel)).to(x.dtype)
    return y, mean.detach(), rstd.detach(), variance.detach(), count


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by its documented definition.

    Without dropout, the attention is usually one operator of hetpipe. A query whose keys are all
    masked gives zeros, as in torch, and gets no gradient: its mask is removed, so that its softmax
    is finite, and its result is replaced by zeros.
    """
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    front = {x.shape[:-2] for x in (query, key, value)}
    is_fused = dropout_p == 0 and len(front) == 1
    fused: Tensor
    if is_fused and attn_mask is None and query.ndim in (3, 4):
        fused = own.attention(query, key, value, is_causal, factor)[0]
        return fused
    masked = None if attn_mask is None else _bias(attn_mask, query.dtype)
    if is_fused and masked is not None and masked[0].dtype == query.dtype and query.ndim == 4:
        bias, without_key = masked
        bias = bias.expand(*bias.shape[:-1], key.shape[-2])
        bias = bias.view((1,) * (4 - bias.ndim) + bias.shape)
        fused = own.masked_attention(query, key, value, bias, factor)[0]
        return fused.masked_fill(without_key, 0.0)
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        read = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(read.logical_not(), -math.inf)
    if masked is not None:
        scores = scores + masked[0]
    weights = scores.softmax(-1)
    if dropout_p > 0:
        weights = torch.native_dropout(weights, dropout_p, True)[0]
    out = weights @ value
    return out if masked is None else out.masked_fill(masked[1], 0.0)


def _bias(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the bias of the scores for a mask, and the rows without keys, whose bias is finite."""
    if mask.dtype == torch.bool:
        hidden = mask.logical_not()
        without_key = hidden.all(-1, keepdim=True)
        bias = torch.zeros_like(mask, dtype=dtype)
        return bias.masked_fill(hidden & without_key.logical_not(), -math.inf), without_key
    without_key = (mask == -math.inf).all(-1, keepdim=True)
    return mask.masked_fill(without_key, 0.0), without_key


def lstm(
    x: Tensor,
    hx: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
    *,
    projected: Callable[..., tuple[Tensor, Tensor, Tensor]],
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `torch.nn.LSTM` with one operator of hetpipe per layer and direction.

    `projected` computes an LSTM with a `proj_size`.
    """
    h0, c0 = hx
    if h0.shape[2] != c0.shape[2]:
        how = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return projected(x, hx, params, *how)
    directions, per_direction = 1 + bidirectional, 4 if has_biases else 2
    y = x.transpose(0, 1) if batch_first else x
    last_h, last_c = [], []
    for layer in range(num_layers):
        if layer > 0 and train and dropout > 0:  # samples first: dropout draws a mask per sample
            y = torch.native_dropout(y.transpose(0, 1), dropout, True)[0].transpose(0, 1)
        ways = []
        for way in range(directions):
            index = layer * directions + way
            w_ih, w_hh, *biases = params[index * per_direction : (index + 1) * per_direction]
            bias = biases[0] + biases[1] if biases else None
            x = y.flip(0) if way else y
            h, cell, *_ = own.lstm_layer(x, h0[index], c0[index], w_ih, w_hh, bias)
            last_h.append(h[-1])
            last_c.append(cell)
            ways.append(h.flip(0) if way else h)
        y = torch.cat(ways, 2) if bidirectional else ways[0]
    return (y.transpose(0, 1) if batch_first else y), torch.stack(last_h), torch.stack(last_c)


def _unmixed(recurrent: Callable[..., Any]) -> Callable[..., Any]:
    """Let `recurrent` compute in the dtype of its parameters, also under autocast."""

    def called(x: Any, hx: Any, params: Any, *how: Any) -> Any:
        dtype = params[0].dtype
        state = [h.to(dtype) for h in hx] if isinstance(hx, (list, tuple)) else hx.to(dtype)
        return recurrent(x.to(dtype), state, params, *how)

    return called


def _unrolled(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's decomposition of a recurrent network refuse dropout instead of ignoring it."""

    def checked(x: Any, hx: Any, params: Any, *how: Any) -> Any:
        _, num_layers, dropout, train, *_ = how
        if train and dropout > 0 and num_layers > 1:
            raise CaptureError(
                f"dropout={dropout} inside a recurrent network is supported only for nn.LSTM "
                "without proj_size; use one module per layer with nn.Dropout between them"
            )
        return decomposition(x, hx, params, *how)

    return checked
