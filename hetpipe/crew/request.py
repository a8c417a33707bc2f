"""Requests to a crew, and their results (stations 2 and 16 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetpipe.schedule.action import Schedule
from hetpipe.schedule.complete import Closing
from hetpipe.simulate.timeline import Timeline
from hetpipe.wire.messages import Array, Clip
from hetpipe.wire.wire import Content


@dataclass(frozen=True)
class WholeLoss:
    """The loss of a whole mini-batch: a mean, or a sum with its count. `feeds` has, by micro-batch,
    the leaves of the batch that backwards read, and that depend on the loss."""

    loss: float
    count: float | None
    feeds: Sequence[Mapping[str, Array]] = ()


@dataclass(frozen=True)
class StepRequest:
    """One mini-batch. Sequences have one entry per micro-batch.

    Without `grad_scale`, gradients are divided by the sum of the losses' counts and by
    `loss_scale`; the `loss_tangents` include `loss_scale` already. `rates` has the learning rates,
    as `Optimizer.rates_at` returns them. `lag` and `ahead`, by stage, choose versions of the
    weights (see `hetpipe.schedule.weights`).
    """

    schedule: Schedule
    samples: tuple[int, ...]
    feeds: Sequence[Mapping[str, Array]]
    loss_tangents: tuple[float, ...]
    rates: Mapping[str, float]
    number: int
    seed: int = 0
    grad_scale: float | None = None
    loss_scale: float = 1.0
    clip: Clip | None = None
    forwards: Content = Content.FORWARD
    keeps_output: bool = False
    """Whether the result has the model's output; for forwards in eval mode."""
    guards: bool = False
    """Whether updates wait for all losses; then nothing is applied if a loss is not finite."""
    lag: Mapping[int, Sequence[int]] = field(default_factory=dict)
    ahead: Mapping[int, Sequence[int]] = field(default_factory=dict)
    fed: int = 0
    """The number that `Crew.feed` has returned for these feeds; 0 if they were not sent ahead."""
    source: str = ""
    """The key of the workers' source that has the leaves instead of `feeds`; empty without one."""
    whole_loss: Callable[[Mapping[str, Array]], WholeLoss] | None = None
    """Computes the loss from the model's outputs of the whole mini-batch, by number. Without it,
    each micro-batch has a loss, which its forward computes."""


@dataclass(frozen=True)
class UpdateRequest:
    """Only sums and updates, for the gradients that earlier mini-batches have accumulated.

    Gradients are multiplied by `grad_scale`; NaN drops the gradients and restores the buffers. At
    the flush of a stream it is None: every update has the factor of its mini-batch.
    """

    schedule: Schedule
    rates: Mapping[str, float]
    number: int
    grad_scale: float | None = None
    clip: Clip | None = None


Request = StepRequest | UpdateRequest


@dataclass(frozen=True)
class StreamPart:
    """A part of a stream; it begins with mini-batch `begins`.

    The schedule's numbers are relative to mini-batch `first` of the stream. `closing` has the
    operations after which a stage is done with a micro-batch.
    """

    first: int
    begins: int
    microbatches: int
    closing: Closing


@dataclass(frozen=True)
class StepResult:
    """Losses and counts by micro-batch, the measured timeline, and values by stage."""

    losses: tuple[float, ...]
    counts: tuple[float, ...] | None
    timeline: Timeline
    versions: tuple[int, ...] = ()  # used by the last forwards, counted in updates
    live_versions: tuple[int, ...] = ()  # the most that existed at once
    most_in_flight: tuple[int, ...] = ()
    peak_nbytes: tuple[int, ...] = ()
    """The most bytes that a replica had on its device at once, see `hetpipe.worker.memory`."""
    skipped: bool = False  # whether the update was left out
    device_nbytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes in use at the end, programs included, by member, for devices that count bytes."""
    culprit: str = ""  # a gradient that is not finite; empty if there is none
    gradient_norm: float | None = None
    """The norm of all gradients before they are clipped; None if they are not."""
    outputs: Mapping[str, Array] = field(default_factory=dict)
    """The tensors of the model's output, of all samples, by number."""
    failure: Exception | None = None
    """The error of the code that computes the loss of a whole mini-batch."""

    def with_loss(self, whole: WholeLoss) -> StepResult:
        """Return the result with the loss of the whole mini-batch."""
        counts = None if whole.count is None else (whole.count,)
        return replace(self, losses=(whole.loss,), counts=counts)
