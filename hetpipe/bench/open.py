"""Opens a pipeline for a workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.capture.captured import Captured
from hetpipe.errors import PlanError
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.zoo.load import optimizer_of
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    from hetpipe.cluster import Cluster

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
    """A pipeline that trains the workload; closed at the end.

    The example batch is the first that `workload.batches(mini_batch, seed)` yields. `resume` is the
    folder of a checkpoint to go on from, `options` are further keywords of `Pipeline`. Cuts that
    the model has not are refused before workers are started. Raises `HetpipeError`.
    """
    plan, cuts, progress = (options.get(name) for name in ("plan", "cuts", "progress"))
    samples = mini_batch or (plan.mini_batch if plan is not None else workload.mini_batch)
    check_count(options.get("microbatches"), samples)
    if progress is not None:
        progress("capturing", 0, 1)
    example = next(workload.batches(samples, seed))
    sync = options.get("sync_batch_norm", False)
    captured = Captured(workload.model, workload.loss_fn, example, sync_batch_norm=sync)
    if cuts is not None:
        check_cuts(cuts, [layer.name for layer in captured.layer_graph(samples).layers])
    options |= {"cluster": cluster, "optimizer": optimizer_of(workload), "seed": seed}
    options["captured"] = captured
    if resume is None:
        pipe = Pipeline(workload.model, workload.loss_fn, example, **options)
    else:
        pipe = Pipeline.load(resume, workload.model, workload.loss_fn, example, **options)
    with pipe:
        yield pipe


def check_count(microbatches: int | None, mini_batch: int) -> None:
    """Raises `PlanError` for more micro-batches than samples."""
    if microbatches is not None and not 1 <= microbatches <= mini_batch:
        raise PlanError(
            f"a mini-batch of {mini_batch} cannot be {microbatches} micro-batches: choose 1 to "
            f"{mini_batch}"
        )


def check_cuts(cuts: Sequence[int], layers: Sequence[str]) -> None:
    """Raises `PlanError`, which lists the layers, for cuts beyond the last one."""
    if max(cuts, default=0) < len(layers):
        return
    listed = "\n".join(f"{number:5d}  {name}" for number, name in enumerate(layers))
    raise PlanError(
        f"cuts {list(cuts)}: the model has {len(layers)} layers, so a stage but the first begins "
        f"at layer 1 to {len(layers) - 1} of\n{listed}"
    )
