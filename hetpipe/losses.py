"""Losses that return `(sum, count)`, so that micro-batches with unlike counts train right.

Each function returns a loss function of the model's output and `y`. Over a mini-batch, the sum of
the sums divided by the sum of the counts equals torch's loss with `reduction="mean"`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from hetpipe.errors import HetpipeError

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Maps an output and `y` to a sum and the count of its terms, both 0-d."""


def cross_entropy(
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    dim: int = 1,
) -> Loss:
    """Return `torch.nn.functional.cross_entropy` as a sum and a count.

    `dim` is the dimension of the classes in the output: 1 as in torch, -1 for a language model's
    logits. `y` has class indices, or probabilities in the output's shape. With a `weight` for each
    class, the count is the sum of the labels' weights.
    """

    def loss(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = output.movedim(dim, 1)
        if y.is_floating_point():
            y = y.movedim(dim, 1)
        total = F.cross_entropy(
            logits, y, weight, ignore_index=ignore_index, reduction="sum",
            label_smoothing=label_smoothing,
        )  # fmt: skip
        if y.is_floating_point():
            return total, total.new_tensor(logits.numel() // logits.shape[1])
        return total, _weight_of(logits, y, weight, ignore_index)

    return loss


def nll(weight: Tensor | None = None, ignore_index: int = -100) -> Loss:
    """Return `torch.nn.functional.nll_loss` as a sum and a count; see `cross_entropy`."""

    def loss(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = F.nll_loss(output, y, weight, ignore_index=ignore_index, reduction="sum")
        return total, _weight_of(output, y, weight, ignore_index)

    return loss


def mse() -> Loss:
    """Return `torch.nn.functional.mse_loss` as a sum and a count."""
    return _elementwise(lambda output, y: F.mse_loss(output, y, reduction="sum"))


def l1() -> Loss:
    """Return `torch.nn.functional.l1_loss` as a sum and a count."""
    return _elementwise(lambda output, y: F.l1_loss(output, y, reduction="sum"))


def bce_with_logits(weight: Tensor | None = None, pos_weight: Tensor | None = None) -> Loss:
    """Return `torch.nn.functional.binary_cross_entropy_with_logits` as a sum and a count."""
    return _elementwise(
        lambda output, y: F.binary_cross_entropy_with_logits(
            output, y, weight, reduction="sum", pos_weight=pos_weight
        )
    )


def _weight_of(logits: Tensor, y: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Return the sum of the weights of the labels that are not ignored."""
    if weight is None:
        return (y != ignore_index).sum().to(logits.dtype)
    ones = torch.ones_like(logits)  # the sum of minus the weights times these
    return F.nll_loss(-ones, y, weight, ignore_index=ignore_index, reduction="sum")


def _elementwise(summed: Callable[[Tensor, Tensor], Tensor]) -> Loss:
    def loss(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if output.shape != y.shape:
            raise HetpipeError(
                f"the output has the shape {list(output.shape)} and y {list(y.shape)}, so torch "
                "would compare each element with several: give both the same shape"
            )
        total = summed(output, y)
        return total, total.new_tensor(output.numel())

    return loss
