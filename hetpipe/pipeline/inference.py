"""Pipelines without an optimizer: they run forwards, and refuse everything that trains."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from hetpipe.pipeline.options import PassOptions, SaveOptions, UpdateOptions

TRAINING = ("step", "run", "fit", "gradients", "diagnose", "save", "rebalance")
"""The calls that need an optimizer."""


def check_given(
    has_loss: bool,
    has_optimizer: bool,
    passes: PassOptions,
    updates: UpdateOptions,
    saves: SaveOptions,
) -> None:
    """Raise `HetpipeError` for a training without a loss, and for options of updates and
    checkpoints without an optimizer."""
    if passes.whole_loss and not has_loss:
        raise HetpipeError(
            f"loss_over={passes.loss_over!r} needs a loss: give loss_fn, or leave loss_over out"
        )
    if has_optimizer:
        if not has_loss:
            raise HetpipeError(
                "loss_fn is None, and a training needs a loss: give loss_fn, or leave out the "
                "optimizer for a pipeline that only predicts"
            )
        return
    names = [
        field.name
        for record in (updates, saves)
        for field in fields(record)
        if getattr(record, field.name) != field.default
    ]
    if names:
        raise HetpipeError(
            f"this pipeline has no optimizer, so {', '.join(names)} would have no effect: give an "
            "optimizer, or leave them out"
        )


def refuse_training(call: str) -> None:
    """Raise `HetpipeError` for a call that needs an optimizer."""
    if call in TRAINING:
        raise HetpipeError(
            f"{call}(): this pipeline has no optimizer: give one, as in hp.Pipeline(..., "
            "optimizer=hp.optim.adamw(lr=1e-3)); without it, a pipeline predicts and evaluates"
        )


def refuse_losses(call: str) -> None:
    """Raise `HetpipeError` for a call that needs a loss."""
    if call == "evaluate":
        raise HetpipeError(
            "evaluate(): this pipeline has no loss_fn: give one to hp.Pipeline, or compute metrics "
            "from predict_batches()"
        )


def no_loss(output: Any, y: Any) -> Any:
    """Return a number in the place of a loss; forwards that only predict do not compute it."""
    import torch
    from torch.utils._pytree import tree_leaves

    tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))
    return next(tensors).float().mean()
