"""Trains a workload on a pipeline, step by step beside unpartitioned torch if asked."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetpipe.bench.eager import Eager, micro_sizes
from hetpipe.bench.zoo import optimizer_of

if TYPE_CHECKING:
    from hetpipe.bench.workload import Workload
    from hetpipe.engine.pipeline import Pipeline

EQUAL = 1e-4
"""Largest relative difference of two losses that rounding may make of the same training."""


@dataclass(frozen=True)
class Step:
    """One step. `expected` is unpartitioned torch's loss, None where that was not run."""

    index: int
    loss: float
    time_s: float
    expected: float | None = None

    @property
    def difference(self) -> float:
        """Relative to torch's loss; 0 where there is none."""
        if self.expected is None:
            return 0.0
        return abs(self.loss - self.expected) / max(abs(self.expected), 1e-12)


def train(
    workload: Workload, pipe: Pipeline, steps: int, *, seed: int, check_steps: int = 0
) -> Iterator[Step]:
    """Train `steps` mini-batches of the plan's size; a `Step` each.

    The first `check_steps` of them are trained by plain torch as well, in the same micro-batches,
    on a copy of the model as it was at the start.
    """
    rows = pipe.plan.mini_batch
    sizes = micro_sizes(rows, pipe.plan.microbatches)
    eager = None
    if check_steps:
        model = copy.deepcopy(workload.model)
        eager = Eager(model, workload.loss_fn, optimizer_of(workload))
    batches = workload.batches(rows, seed)
    for index in range(steps):
        x, y = next(batches)
        expected = eager.step(x, y, sizes) if eager and index < check_steps else None
        begin_s = time.perf_counter()
        loss = pipe.step(x, y)
        yield Step(index, loss, time.perf_counter() - begin_s, expected)
