"""Puts the average of the weights in the place of the weights, for forwards and reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import AVERAGE

if TYPE_CHECKING:
    from hetpipe.pipeline.training import Training


def check_average(training: Training) -> None:
    """Raise `HetpipeError` if the training keeps no average of the weights."""
    if training.setup.updates.ema is None:
        raise HetpipeError(
            "this pipeline keeps no average of the weights: give it one, as in "
            "hp.Pipeline(..., ema=0.999), or leave ema out here"
        )


def swap_average(training: Training) -> None:
    """Exchange the weights and their average on the devices; twice changes nothing.

    The training must be at rest. Before the first update the average is the weights.
    """
    training.stages.check_own()
    if any(training.updates):
        training.setup.crew.swap(AVERAGE)


@contextmanager
def averaged(training: Training) -> Iterator[None]:
    """Have the average in the place of the weights. The training must be at rest."""
    check_average(training)
    swap_average(training)
    try:
        yield
    finally:
        swap_average(training)
