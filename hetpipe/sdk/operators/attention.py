"""Attention as one operator: a backend with a fused kernel needs no length x length tensor.

    out = softmax(scale * query @ key^T) @ value

Shapes: query [..., L, E], key [..., S, E], value [..., S, V], out [..., L, V], with one or two
leading dimensions; logsumexp [..., L] is the natural logarithm of each row's sum of exponentials.
Causal: row i reads the keys 0 to i, whatever the lengths. The backward computes the softmax again
from logsumexp, after Dao, "FlashAttention-2" (2023), section 2.3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetpipe.sdk.operators.custom import operator

aten = torch.ops.aten


@operator("attention")
def attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return (out, logsumexp); see the module for shapes. logsumexp is float32 or wider."""
    if not has_flash(query, value):
        return plain_attention(query, key, value, is_causal, scale)
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *four_dimensions(query, key, value), 0.0, is_causal, scale=scale
    )
    return out.view(_like(query, value)), logsumexp.view(query.shape[:-1])


@operator("attention_backward")
def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_query, grad_key, grad_value) of `attention`, from its `out` and `logsumexp`."""
    if not has_flash(query, value):
        return plain_attention_backward(
            grad_out, query, key, value, out, logsumexp, is_causal, scale
        )
    operands = four_dimensions(grad_out, query, key, value, out)
    sums = logsumexp.unsqueeze(1) if logsumexp.ndim == 2 else logsumexp
    gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *operands, sums, 0.0, is_causal, scale=scale
    )
    grad_query, grad_key, grad_value = (
        gradient.view(x.shape) for gradient, x in zip(gradients, (query, key, value), strict=True)
    )
    return grad_query, grad_key, grad_value


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute `attention` by products and exponentials."""
    return weighted_values(_causal_scores(query, key, is_causal, scale), value)


def plain_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_backward` by products and exponentials."""
    weights = (_causal_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    grad_scores = score_gradients(grad_out, weights, value, out)
    return operand_gradients(grad_out, query, key, weights.to(value.dtype), grad_scores * scale)


def weighted_values(scores: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out, logsumexp) of an attention from its scores."""
    top = scores.amax(-1, keepdim=True)
    powers = (scores - top).exp()
    total = powers.sum(-1, keepdim=True)
    out = (powers / total).to(value.dtype) @ value
    if out.ndim == 4:  # `empty_heads` promises this layout, and later views rely on it
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
    return out, (top + total.log()).squeeze(-1)


def score_gradients(grad_out: Tensor, weights: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """Return the gradient of the scores, from the softmax of the scores."""
    shift = (grad_out * out).sum(-1, keepdim=True)
    return weights * (grad_out @ value.transpose(-2, -1) - shift)


def operand_gradients(
    grad_out: Tensor, query: Tensor, key: Tensor, weights: Tensor, grad_products: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (grad_query, grad_key, grad_value); `grad_products` is of query @ key^T."""
    grad_value = weights.transpose(-2, -1) @ grad_out
    grad_products = grad_products.to(query.dtype)
    return grad_products @ key, grad_products.transpose(-2, -1) @ query, grad_value


def scores_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return scale * query @ key^T in float32 or wider."""
    scores = (query * scale) @ key.transpose(-2, -1)
    return scores.to(torch.promote_types(query.dtype, torch.float32))


def _causal_scores(query: Tensor, key: Tensor, is_causal: bool, scale: float) -> Tensor:
    scores = scores_of(query, key, scale)
    if is_causal:
        size = (query.shape[-2], key.shape[-2])
        read = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        scores = scores.masked_fill(read.logical_not(), float("-inf"))
    return scores


def has_flash(query: Tensor, value: Tensor) -> bool:
    """Return whether torch's fused kernel takes these tensors: the kernel needs equal widths."""
    return query.device.type == "cpu" and query.shape[-1] == value.shape[-1]


def four_dimensions(*tensors: Tensor) -> list[Tensor]:
    """Return tensors [batch, heads, length, width] whose last dimension has no gaps."""
    dense = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [x.unsqueeze(1) if x.ndim == 3 else x for x in dense]


def _like(query: Tensor, value: Tensor) -> tuple[int, ...]:
    return (*query.shape[:-1], value.shape[-1])


def empty_heads(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor with all heads of a row side by side, like torch's fused kernel."""
    if len(shape) == 3:
        return x.new_empty(shape)
    batch, heads, length, width = shape
    return x.new_empty(batch, length, heads, width).transpose(1, 2)


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    out = empty_heads(query, _like(query, value))
    return out, query.new_empty(query.shape[:-1], dtype=wide)


@attention_backward.register_fake
def _(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return (
        empty_heads(query, query.shape),
        empty_heads(key, key.shape),
        empty_heads(value, value.shape),
    )


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, ctx.is_causal, ctx.scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, *output)


def _gradients(ctx: Any, grad_out: Tensor, _: None) -> tuple[Tensor | None, ...]:
    gradients = attention_backward(grad_out, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
    return (*gradients, None, None)


attention.register_autograd(_gradients, setup_context=_remember)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.hetpipe.attention.default: plain_attention,
    torch.ops.hetpipe.attention_backward.default: plain_attention_backward,
}
"""Decompositions; tracing decomposes the resulting operators further, down to core ATen."""
