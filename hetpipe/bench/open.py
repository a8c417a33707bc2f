"""Opens a pipeline for a workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.cluster import Cluster
    from hetpipe.plan.plan import Plan
    from hetpipe.profile.measure import Progress

SEED = 0


@contextmanager
def open_pipeline(
    workload: Workload,
    cluster: Cluster,
    *,
    mini_batch: int | None = None,
    microbatches: int | None = None,
    schedule: str = "auto",
    weights: str = "auto",
    cuts: Sequence[int] | None = None,
    replicas: Sequence[int] | None = None,
    sync_batch_norm: bool = False,
    plan: Plan | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
    resume: Path | None = None,
) -> Iterator[Pipeline]:
    """A pipeline that trains the workload; closed at the end.

    The example batch is the first that `workload.batches(mini_batch, seed)` yields. `resume` is the
    folder of a checkpoint to go on from. Raises `HetpipeError`.
    """
    rows = mini_batch or (plan.mini_batch if plan is not None else workload.mini_batch)
    options: dict[str, Any] = {
        "cluster": cluster, "optimizer": optimizer_of(workload), "schedule": schedule,
        "weights": weights, "seed": seed, "progress": progress, "sync_batch_norm": sync_batch_norm,
    }  # fmt: skip
    options |= {"plan": plan, "microbatches": microbatches, "cuts": cuts, "replicas": replicas}
    example = next(workload.batches(rows, seed))
    if resume is None:
        pipe = Pipeline(workload.model, workload.loss_fn, example, **options)
    else:
        pipe = Pipeline.load(resume, workload.model, workload.loss_fn, example, **options)
    with pipe:
        yield pipe
