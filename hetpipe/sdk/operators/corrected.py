"""Corrected versions of wrong decompositions in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

Tensor = torch.Tensor


def multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
    """Return the loss, and a mask with 1 at each label; `x` and `target` are [..., classes].

    The loss sums max(0, 1 - x[j] + x[i]) / classes over labels j and all classes i without a label.
    The labels in `target` end before its first negative entry; torch 2.13 also counts labels after
    this entry.
    """
    classes = x.shape[-1]
    rows, labels = x.reshape(-1, classes), target.reshape(-1, classes)
    known = (labels < 0).to(torch.int64).cumsum(1) == 0
    place = torch.where(known, labels, 0)
    number = torch.arange(classes, device=x.device)
    is_target = ((place.unsqueeze(2) == number) & known.unsqueeze(2)).any(1)
    gap = 1 - torch.gather(rows, 1, place).unsqueeze(2) + rows.unsqueeze(1)
    counts = known.unsqueeze(2) & ~is_target.unsqueeze(1) & (gap > 0)
    loss = torch.where(counts, gap, 0.0).sum([1, 2]) / classes
    if reduction == 0:
        loss = loss.reshape(x.shape[:-1])
    else:
        loss = loss.mean() if reduction == 1 else loss.sum()
    return loss, is_target.to(x.dtype).reshape(x.shape)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.multilabel_margin_loss_forward.default: multilabel_margin_loss
}
