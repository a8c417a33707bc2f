"""Open a pipeline for a workload."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.plan.plan import Plan

SEED = 0


@contextmanager
def open_pipeline(
    workload: Workload,
    cluster: Cluster,
    *,
    mini_batch: int | None = None,
    seed: int = SEED,
    resume: Path | None = None,
    **options: Any,
) -> Iterator[Pipeline]:
    """Open a pipeline that trains the workload, and close it at the end.

    The example batch is the first batch of `workload.batches(mini_batch, seed)`. `resume` is the
    folder of a checkpoint to continue from; `options` are further keywords of `Pipeline`. Raises
    `HetpipeError` if the pipeline cannot be opened.
    """
    plan: Plan | None = options.get("plan")
    samples = mini_batch or (plan.mini_batch if plan is not None else workload.mini_batch)
    example = next(workload.batches(samples, seed))
    options |= {"cluster": cluster, "optimizer": optimizer_of(workload), "seed": seed}
    if resume is None:
        pipe = Pipeline(workload.model, workload.loss_fn, example, **options)
    else:
        pipe = Pipeline.load(resume, workload.model, workload.loss_fn, example, **options)
    with pipe:
        yield pipe
