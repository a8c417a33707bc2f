"""Weight policies as data: they choose the version of the weights that each pass uses.

A policy is one row of the table at the end, which planner, streams and checks read. For each way of
`Keeping` a worker has one class that handles buffers (`hetpipe.worker.weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hetpipe.errors import ScheduleError
from hetpipe.schedule.rule import Rule
from hetpipe.schedule.stream import Stream


class Keeping(Enum):
    """The versions that a stage keeps on its device."""

    PRESENT = "present"
    """One version, which every pass uses."""
    STASH = "stash"
    """The versions that forwards used, until their backwards have used them too."""
    RECENT = "recent"
    """The same, and all younger versions: a forward may use an older version than the present."""
    PREDICTED = "predicted"
    """One version, and a predicted copy while a pass uses it."""


Lag = Callable[[Stream, int, int], tuple[int, ...]]
"""(stream, stage, mini-batch) -> per micro-batch, the number of updates between the version for its
forward and the present version."""

Ahead = Callable[[Stream, int, int], int]
"""(stream, stage, micro-batch) -> the number of updates by which its forward predicts ahead."""

Versions = Callable[[Sequence[int], int, int], int]
"""(in flight by stage, stage, micro-batches) -> the number of versions that exist at once, with a
predicted copy."""


def _present(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    return (0,) * stream.microbatches


def _as_the_input_stage(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    """Return the input stage's version when the mini-batch enters (PipeDream, section 3.3).

    It is counted in mini-batches, so that stages with different numbers of replicas agree.
    """
    first = mini_batch * stream.microbatches
    mini_batches = stream.applied(0, first) * stream.per_update[0]
    return _older(stream, stage, mini_batch, mini_batches // stream.per_update[stage])


def _last_but_one(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    """Return the version before the last, for all of a mini-batch (2BW, section 3.1)."""
    version = max(mini_batch // stream.per_update[stage] - 1, 0)
    return _older(stream, stage, mini_batch, version)


def _older(stream: Stream, stage: int, mini_batch: int, version: int) -> tuple[int, ...]:
    return tuple(stream.applied(stage, m) - version for m in stream.microbatches_of(mini_batch))


def _nothing(stream: Stream, stage: int, microbatch: int) -> int:
    return 0


def _until_its_backward(stream: Stream, stage: int, microbatch: int) -> int:
    return stream.ahead(stage, microbatch)


def _until_it_leaves(stream: Stream, stage: int, microbatch: int) -> int:
    """Return SpecTrain's s of a forward (section 3.2)."""
    return stage // 2 + stream.stages - stage - 1


def _half_way_down(stage: int) -> int:
    """Return SpecTrain's s of a backward (section 3.2)."""
    return stage // 2


def _one(in_flight: Sequence[int], stage: int, microbatches: int) -> int:
    return 1


def _two(in_flight: Sequence[int], stage: int, microbatches: int) -> int:
    return 2


def _own_depth(in_flight: Sequence[int], stage: int, microbatches: int) -> int:
    return -(-in_flight[stage] // microbatches)


def _input_depth(in_flight: Sequence[int], stage: int, microbatches: int) -> int:
    return -(-in_flight[0] // microbatches)


@dataclass(frozen=True)
class WeightPolicy:
    """One way to choose versions. The defaults restrict nothing."""

    name: str
    keeping: Keeping
    versions: Versions
    flushes: bool = False
    """Whether it is for schedules that flush, or for the others."""
    lag: Lag = _present
    ahead: Ahead = _nothing
    backward_ahead: Callable[[int], int] | None = None
    """stage -> the number of updates by which a backward predicts ahead; None: it does not."""
    optimizers: tuple[str, ...] = ()
    """The optimizers for whose momentum the prediction is defined; empty: all that can predict."""
    straight: bool = False
    """Whether it is defined only at PipeDream's NOAM, with one micro-batch and no replicas."""
    accumulates: bool = False
    """Whether a mini-batch must have at least as many micro-batches as are in flight."""

    @property
    def predicts(self) -> bool:
        """Whether the optimizer must predict weights."""
        return self.keeping is Keeping.PREDICTED

    def has_depth(self, in_flight: Sequence[int], microbatches: int) -> bool:
        """Whether the policy is defined for these numbers of forwards in flight, by stage."""
        if self.straight and list(in_flight) != _noam(len(in_flight)):
            return False
        return not self.accumulates or in_flight[0] <= microbatches

    def check(
        self, rule: Rule, in_flight: Sequence[int], microbatches: int, replicas: Sequence[int]
    ) -> None:
        """Raise `ScheduleError` if the policy does not fit a schedule or its numbers."""
        self.check_rule(rule)
        if self.accumulates and not self.has_depth(in_flight, microbatches):
            raise ScheduleError(
                f"{self.name} accumulates at least as many micro-batches as are in flight: "
                f"{microbatches} in a mini-batch, {in_flight[0]} in flight; use {in_flight[0]} "
                "micro-batches or more"
            )
        if not self.straight:
            return
        if microbatches != 1 or not self.has_depth(in_flight, microbatches):
            raise ScheduleError(
                f"{self.name} is defined for {_noam(len(in_flight))} mini-batches of one "
                f"micro-batch in flight, not for {list(in_flight)} micro-batches of "
                f"{microbatches} each"
            )
        if max(replicas, default=1) > 1:
            raise ScheduleError(
                f"{self.name} is defined for stages on one device each, not for {list(replicas)} "
                "replicas; use weights='pipeoptim'"
            )

    def check_rule(self, rule: Rule) -> None:
        """Raise `ScheduleError` if the policy does not fit a schedule."""
        if self.flushes != rule.flushes:
            kind = "synchronous" if rule.flushes else "asynchronous"
            fitting = [p.name for p in _policies.values() if p.flushes == rule.flushes]
            raise ScheduleError(
                f"schedule {rule.name} is {kind} and weights={self.name!r} does not fit it: "
                f"choose {' or '.join(map(repr, fitting))}, or another schedule"
            )
        if not rule.averages and self is not STASH:
            raise ScheduleError(
                f"under {rule.name} a replica updates nothing between a forward and its backward, "
                f"so weights={self.name!r} has nothing to choose from: use 'stash', the default"
            )


def _noam(stages: int) -> list[int]:
    return [stages - stage for stage in range(stages)]


def policy_of(name: str | WeightPolicy) -> WeightPolicy:
    """Return the policy with this name. Raises `ScheduleError` for an unknown name."""
    if isinstance(name, WeightPolicy):
        return name
    if name not in _policies:
        raise ScheduleError(f"no weight policy {name!r}; known: {', '.join(_policies)}")
    return _policies[name]


def policy_for(rule: Rule, name: str = "auto") -> WeightPolicy:
    """Return the policy with this name, or for "auto" the rule's default. Raises `ScheduleError` if
    it does not fit the rule."""
    policy = policy_of(("flush" if rule.flushes else "stash") if name == "auto" else name)
    policy.check_rule(rule)
    return policy


FLUSH = WeightPolicy("flush", Keeping.PRESENT, _one, flushes=True)
STASH = WeightPolicy("stash", Keeping.STASH, _own_depth)

_policies = {
    policy.name: policy
    for policy in (
        FLUSH,
        STASH,
        WeightPolicy("vertical-sync", Keeping.RECENT, _input_depth, lag=_as_the_input_stage),
        WeightPolicy("2bw", Keeping.RECENT, _two, lag=_last_but_one, accumulates=True),
        WeightPolicy(
            "spectrain", Keeping.PREDICTED, _two, ahead=_until_it_leaves,
            backward_ahead=_half_way_down, optimizers=("sgd",), straight=True,
        ),
        WeightPolicy("pipeoptim", Keeping.PREDICTED, _two, ahead=_until_its_backward),
    )
}  # fmt: skip
