"""What a crew is asked to do, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hetpipe.schedule.action import Schedule
from hetpipe.schedule.closing import Closing
from hetpipe.simulate.timeline import Timeline
from hetpipe.wire.messages import Array, Clip


@dataclass(frozen=True)
class StepRequest:
    """One mini-batch. Sequences have one entry per micro-batch.

    `grad_scale` None: 1 / sum of the counts that the last stage reports, over `loss_scale`, by
    which `loss_tangents` were multiplied. `lag` and `ahead`, by stage, choose versions of the
    weights (see `hetpipe.schedule.weights`).
    """

    schedule: Schedule
    samples: tuple[int, ...]
    feeds: Sequence[Mapping[str, Array]]
    loss_tangents: tuple[float, ...]
    lr: float
    number: int
    seed: int = 0
    grad_scale: float | None = None
    loss_scale: float = 1.0
    clip: Clip | None = None
    evaluates: bool = False
    guards: bool = False
    """Whether nothing is applied where a loss is not finite: updates wait until all are known."""
    lag: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ahead: Mapping[int, Sequence[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Apply:
    """Sums and updates by themselves, of gradients that earlier mini-batches left.

    They are multiplied by `grad_scale`; NaN drops them, and all else that those mini-batches did.
    """

    schedule: Schedule
    lr: float
    number: int
    grad_scale: float | None = None
    clip: Clip | None = None


Request = StepRequest | Apply


@dataclass(frozen=True)
class Part:
    """A part of a stream. Numbers in the schedule count from mini-batch `first`; `begins` is the
    mini-batch that comes with it, `closing` what ends a micro-batch (of the whole stream)."""

    first: int
    begins: int
    microbatches: int
    closing: Closing


@dataclass(frozen=True)
class StepResult:
    """Losses and counts per micro-batch, and when everything happened; the rest is by stage."""

    losses: tuple[float, ...]
    counts: tuple[float, ...] | None
    timeline: Timeline
    versions: tuple[int, ...] = ()
    """That the last forward used, counted in updates."""
    live_versions: tuple[int, ...] = ()
    """Most at once."""
    most_in_flight: tuple[int, ...] = ()
    """Micro-batches that a backward has yet to read."""
    peak_nbytes: tuple[int, ...] = ()
    """Most on a replica's device, see `hetpipe.worker.memory`."""
    skipped: bool = False
    """Whether the update was left out."""
