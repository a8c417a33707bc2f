"""Mini-batches: their samples, the sizes of their micro-batches, and their mean losses (stations 1
and 16 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from hetpipe.buckets import like
from hetpipe.errors import HetpipeError, NoMeanError, NotFiniteError
from hetpipe.pipeline.remote import Present
from hetpipe.wire.shares import divide

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.crew.request import StepResult
    from hetpipe.plan.plan import Plan

T = TypeVar("T")


def micro_sizes(rows: int, microbatches: int) -> tuple[int, ...]:
    """Return the sizes of min(microbatches, rows) micro-batches; sizes differ by at most one."""
    count = min(microbatches, rows)
    return tuple(like(rows // count + (index < rows % count), rows) for index in range(count))


def sizes_of(captured: Captured, leaves: Mapping[str, Any], plan: Plan) -> tuple[int, ...]:
    """Return the sizes of a mini-batch's micro-batches, in its bucket."""
    return micro_sizes(captured.example.size_of(leaves), plan.microbatches)


def read(
    captured: Captured, x: Any, y: Any, plan: Plan
) -> tuple[dict[str, Any], tuple[int, ...], str]:
    """Return the leaves of a mini-batch, the sizes of its micro-batches, and the key of the
    workers' source if these have the leaves instead. Raises `HetpipeError` for wrong leaves."""
    if isinstance(x, Present):
        return {}, micro_sizes(x.samples, plan.microbatches), x.key
    leaves = captured.leaves(x, y)
    samples = sizes_of(captured, leaves, plan)
    if len(parts := parts_of(samples, plan)) > 1:
        captured.check_means(leaves, parts)
    return leaves, samples, ""


def forward_sizes(captured: Captured, leaves: Mapping[str, Any], plan: Plan) -> tuple[int, ...]:
    """Return the sizes of a mini-batch's micro-batches for forwards in eval mode: fewer and larger
    ones than in a training if replicas could not divide these. Raises `HetpipeError` if replicas
    cannot divide the whole mini-batch."""
    rows, count = captured.example.size_of(leaves), plan.microbatches
    if plan.rule.flushes:
        count = max(1, min(count, rows // max(plan.replicas)))
    sizes = micro_sizes(rows, count)
    for stage in plan.stages if plan.rule.flushes else ():
        divide(int(sizes[-1]), stage.shares)
    return sizes


def can_divide(samples: int, plan: Plan) -> bool:
    """Whether every replica of a plan gets rows of a micro-batch."""
    return not plan.rule.flushes or samples >= max(plan.replicas)


def size_of(samples: Sequence[int]) -> int:
    """Return the size of a mini-batch with micro-batches of these sizes."""
    return like(sum(samples), samples[0])


def parts_of(samples: Sequence[int], plan: Plan) -> list[int]:
    """Return the number of samples behind each loss of a mini-batch: a micro-batch's samples or,
    under a schedule that flushes, a replica's rows."""
    if not plan.rule.flushes:
        return list(samples)
    return [rows for size in samples for rows in divide(size, plan.stages[-1].shares)]


def check_whole(samples: Sequence[int], plan: Plan) -> None:
    """Raise `HetpipeError` for a mini-batch with too few samples for the plan's micro-batches."""
    if len(samples) != plan.microbatches:
        raise HetpipeError(
            f"a mini-batch of {sum(samples)} samples is too small for {plan.microbatches} "
            f"micro-batches, and {plan.schedule} needs all of them; leave this mini-batch out"
        )


def slices(leaves: Mapping[str, Any], samples: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the leaves of each micro-batch."""
    lo = 0
    for size in samples:
        yield {name: leaf[lo : lo + size] for name, leaf in leaves.items()}
        lo += size


def check_gradients(result: StepResult, index: int, advice: str = "") -> None:
    """Raise `NotFiniteError` if a gradient of mini-batch `index` is not finite. In a stream, the
    gradient may belong to a mini-batch shortly before."""
    if result.culprit:
        raise NotFiniteError(
            f"{result.culprit} is not finite in mini-batch {index}, although the loss is finite",
            index,
            ": pipe.diagnose(x, y) with that mini-batch names the first operator whose result is "
            f"not finite; values of the batch that are far too large are a possible cause.{advice}",
        )


def mean_loss(result: StepResult, samples: Sequence[int], index: int) -> float:
    """Return the mean loss of mini-batch `index`.

    Raises `NotFiniteError` if the mean is not finite, `NoMeanError` if the loss's count is 0, and
    the error of a loss of the whole mini-batch.
    """
    if result.failure is not None:
        raise result.failure
    if result.counts is not None and sum(result.counts) == 0:
        raise NoMeanError(
            f"the loss of mini-batch {index} has no mean: its count is 0",
            index,
            ", because none of its samples, or labels, counts; leave such a mini-batch out.",
        )
    if result.counts is not None:
        mean = sum(result.losses) / sum(result.counts)
    elif len(result.losses) == 1:
        mean = result.losses[0]
    else:
        losses = zip(result.losses, samples, strict=True)
        mean = sum(loss * size for loss, size in losses) / sum(samples)
    if not math.isfinite(mean):
        first = next((m for m, loss in enumerate(result.losses) if not math.isfinite(loss)), 0)
        raise NotFiniteError(
            f"the loss of mini-batch {index} is {mean} (first in micro-batch {first})",
            index,
            ": pipe.diagnose(x, y) with that mini-batch names the first layer and operator whose "
            "result is not finite, and says whether a device or the numbers are to blame.",
        )
    return mean


def copied(values: T) -> T:
    """Copy a mini-batch, or a part of one, to the host's memory."""
    import torch
    from torch.utils._pytree import tree_map

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to("cpu", copy=True)
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return cast("T", tree_map(copy, values))
