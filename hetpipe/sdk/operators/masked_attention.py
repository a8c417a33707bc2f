"""Attention with a mask or a bias as one operator; see `attention` for the symbols.

    out = softmax(scale * query @ key^T + bias) @ value

Shapes: as in `attention`, with two leading dimensions; bias [N, H, L, S] in query's dtype, where N,
H and L may be 1. -inf hides a key. Each row must see a key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetpipe.sdk.operators.attention import (
    empty_heads,
    four_dimensions,
    has_flash,
    operand_gradients,
    score_gradients,
    scores_of,
    weighted_values,
)
from hetpipe.sdk.operators.custom import operator

aten = torch.ops.aten


@operator("masked_attention")
def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out, logsumexp); see the module for shapes. logsumexp is float32 or wider."""
    if not has_flash(query, value):
        return plain_masked_attention(query, key, value, bias, scale)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *four_dimensions(query, key, value), attn_mask=bias, scale=scale
    )
    return out, logsumexp


@operator("masked_attention_backward")
def masked_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_query, grad_key, grad_value), from `out` and `logsumexp` of the forward."""
    if not has_flash(query, value):
        return plain_masked_attention_backward(
            grad_out, query, key, value, bias, out, logsumexp, scale
        )
    grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *four_dimensions(grad_out, query, key, value, out), logsumexp, 0.0, False,
        attn_mask=bias, scale=scale,
    )  # fmt: skip
    return grad_query, grad_key, grad_value


def plain_masked_attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `masked_attention` by products and exponentials."""
    return weighted_values(scores_of(query, key, scale) + bias, value)


def plain_masked_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `masked_attention_backward` by products and exponentials."""
    weights = _weights(query, key, bias, logsumexp, scale)
    grad_scores = score_gradients(grad_out, weights, value, out)
    return operand_gradients(grad_out, query, key, weights.to(value.dtype), grad_scores * scale)


def _weights(query: Tensor, key: Tensor, bias: Tensor, logsumexp: Tensor, scale: float) -> Tensor:
    """Compute the softmax of the scores again, from the logarithms of its sums."""
    return (scores_of(query, key, scale) + bias - logsumexp.unsqueeze(-1)).exp()


@masked_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = empty_heads(query, (*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(query.shape[:-1], dtype=wide)


@masked_attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(empty_heads(x, tuple(x.shape)) for x in (query, key, value))


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *operands, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*operands, *output)


def _gradients(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = masked_attention_backward(grad_out, *ctx.saved_tensors, ctx.scale)
    grad_bias = None
    if ctx.needs_input_grad[3]:  # no kernel of torch computes it for processors
        query, key, value, bias, out, logsumexp = ctx.saved_tensors
        weights = _weights(query, key, bias, logsumexp, ctx.scale)
        grad_bias = score_gradients(grad_out, weights, value, out).sum_to_size(bias.shape)
        grad_bias = grad_bias.to(bias.dtype)
    return (*gradients, grad_bias, None)


masked_attention.register_autograd(_gradients, setup_context=_remember)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.hetpipe.masked_attention.default: plain_masked_attention,
    torch.ops.hetpipe.masked_attention_backward.default: plain_masked_attention_backward,
}
"""Decompositions; tracing decomposes the resulting operators further, down to core ATen."""
