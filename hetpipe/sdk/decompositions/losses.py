"""Gradients of margin losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def multi_margin_backward(
    gradient: Tensor, x: Tensor, target: Tensor, p: float, margin: float,
    weight: Tensor | None = None, reduction: int = 1,
) -> Tensor:  # fmt: skip
    """Return the gradient of `multi_margin_loss`.

    The loss of a row is the sum over other classes of max(0, margin - x[target] + x)^p / classes.
    """
    rows, classes = x.reshape(-1, x.shape[-1]), x.shape[-1]
    target = target.reshape(-1, 1)
    gap = margin - torch.gather(rows, 1, target) + rows
    other = torch.arange(classes, device=x.device) != target
    slope = torch.where(other & (gap > 0), torch.ones_like(gap) if p == 1 else 2 * gap, 0.0)
    if weight is not None:
        slope = slope * weight.index_select(0, target.reshape(-1)).unsqueeze(1)
    slope = torch.where(other, slope, -slope.sum(1, keepdim=True)) / classes
    return (slope * _shared(gradient, rows.shape[0], reduction)).reshape(x.shape)


def multilabel_margin_backward(
    gradient: Tensor, x: Tensor, target: Tensor, reduction: int, is_target: Tensor
) -> Tensor:
    """Return the gradient of `multilabel_margin_loss`.

    The loss of a row is the sum over labels j and other classes i of
    max(0, 1 - x[j] + x[i]) / classes.
    """
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1, x.shape[-1])
    other = is_target.reshape(rows.shape) == 0
    # Labels end before the first negative one.
    known = (labels < 0).to(torch.int64).cumsum(1) == 0
    place = labels.clamp(min=0)
    gap = 1 - torch.gather(rows, 1, place).unsqueeze(2) + rows.unsqueeze(1)
    counts = known.unsqueeze(2) & other.unsqueeze(1) & (gap > 0)
    slope = counts.to(x.dtype)
    by_others, by_labels = slope.sum(1), torch.where(known, slope.sum(2), 0.0)
    total = by_others.scatter_add(1, place, -by_labels) / x.shape[-1]
    return (total * _shared(gradient, rows.shape[0], reduction)).reshape(x.shape)


def _shared(gradient: Tensor, rows: int, reduction: int) -> Tensor:
    """Return the gradient by the loss of each row; `reduction` is none (0), mean (1) or sum (2)."""
    if reduction == 0:
        return gradient.reshape(-1, 1)
    return gradient / rows if reduction == 1 else gradient


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.multi_margin_loss_backward.default: multi_margin_backward,
    aten.multilabel_margin_loss_backward.default: multilabel_margin_backward,
}
"""Decompositions by operator."""
