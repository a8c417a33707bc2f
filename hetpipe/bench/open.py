"""Opens a pipeline for a workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hetpipe.bench.workload import Workload
from hetpipe.bench.zoo import optimizer_of
from hetpipe.engine.pipeline import Pipeline

if TYPE_CHECKING:
    from hetpipe.cluster import Cluster
    from hetpipe.engine.measure import Progress
    from hetpipe.plan.plan import Plan

SEED = 0


@contextmanager
def open_pipeline(
    workload: Workload,
    cluster: Cluster,
    *,
    mini_batch: int | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    plan: Plan | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
) -> Iterator[Pipeline]:
    """A pipeline that trains the workload; closed at the end.

    The example batch is the first that `workload.batches(mini_batch, seed)` yields. Raises
    `HetpipeError`.
    """
    rows = mini_batch or (plan.mini_batch if plan is not None else workload.mini_batch)
    with Pipeline(
        workload.model,
        workload.loss_fn,
        next(workload.batches(rows, seed)),
        cluster=cluster,
        optimizer=optimizer_of(workload),
        microbatches=microbatches,
        schedule=schedule,
        plan=plan,
        seed=seed,
        progress=progress,
    ) as pipe:
        yield pipe
