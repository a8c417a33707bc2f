"""Weight policies: a policy chooses the version of the weights that each pass uses.

A policy is one row of the table `_policies` at the end. For each value of `Keeping`,
`hetpipe.worker.weights` has one class that handles the buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from hetpipe.errors import ScheduleError
from hetpipe.schedule.rule import Rule
from hetpipe.schedule.stream import Stream
from hetpipe.words import choices


class Keeping(Enum):
    """The versions that a stage keeps on its device."""

    PRESENT = "present"
    """Only the present version, which every pass uses."""
    STASH = "stash"
    """Each version that a forward used, until the micro-batch's backward has used it as well."""
    RECENT = "recent"
    """The versions that STASH keeps, and all younger versions: a forward may use a version older
    than the present one."""
    PREDICTED = "predicted"
    """The present version, and a predicted copy while a pass uses that copy."""


Lag = Callable[[Stream, int, int], tuple[int, ...]]
"""(stream, stage, mini-batch) -> for each micro-batch, the age in updates of the version that its
forward uses; 0: the present version."""

Ahead = Callable[[Stream, int, int], int]
"""(stream, stage, micro-batch) -> by how many updates the forward predicts ahead."""

Versions = Callable[[Sequence[int], int, int], int]
"""(in flight by stage, stage, micro-batches) -> the number of versions that exist at the same time,
including a predicted copy."""


def _present(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    return (0,) * stream.microbatches


def _as_the_input_stage(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    """Return the lags if all stages use the version that the input stage had when the mini-batch
    entered (PipeDream, section 3.3). The version is counted in mini-batches, so that stages with
    different numbers of replicas agree."""
    first = mini_batch * stream.microbatches
    mini_batches = stream.applied(0, first) * stream.per_update[0]
    return _older(stream, stage, mini_batch, mini_batches // stream.per_update[stage])


def _last_but_one(stream: Stream, stage: int, mini_batch: int) -> tuple[int, ...]:
    """Return the lags if all micro-batches of a mini-batch use the last version but one (2BW,
    section 3.1)."""
    version = max(mini_batch // stream.per_update[stage] - 1, 0)
    return _older(stream, stage, mini_batch, version)


def _older(stream: Stream, stage: int, mini_batch: int, version: int) -> tuple[int, ...]:
    return tuple(stream.applied(stage, m) - version for m in stream.microbatches_of(mini_batch))


def _nothing(stream: Stream, stage: int, microbatch: int) -> int:
    return 0


def _until_its_backward(stream: Stream, stage: int, microbatch: int) -> int:
    return stream.ahead(stage, microbatch)


def _until_it_leaves(stream: Stream, stage: int, microbatch: int) -> int:
    """Return SpecTrain's version difference s of a forward (section 3.2)."""
    return stage // 2 + stream.stages - stage - 1


def _half_way_down(stage: int) -> int:
    """Return SpecTrain's version difference s of a backward (section 3.2)."""
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
    """One way to choose the versions of weights."""

    name: str
    keeping: Keeping
    versions: Versions
    flushes: bool = False
    """Whether the policy is for schedules that flush; if not, it is for all others."""
    lag: Lag = _present
    ahead: Ahead = _nothing
    backward_ahead: Callable[[int], int] | None = None
    """stage -> by how many updates a backward predicts ahead; None: no prediction."""
    optimizers: tuple[str, ...] = ()
    """Optimizers for which the prediction is defined; empty: all optimizers that can predict."""
    straight: bool = False
    """Whether the policy needs PipeDream's NOAM (N-n forwards in flight at stage n of N),
    mini-batches of one micro-batch, and no replicas."""
    accumulates: bool = False
    """Whether a mini-batch must have at least as many micro-batches as stage 0 has in flight."""

    @property
    def predicts(self) -> bool:
        """Whether the optimizer must predict weights."""
        return self.keeping is Keeping.PREDICTED

    def borrowed(self, in_flight: Sequence[int], stage: int, microbatches: int) -> int:
        """Return the versions that a stage keeps of a parameter that an earlier stage owns: one for
        each mini-batch in flight."""
        return 1 if self.flushes else 1 - (1 - in_flight[stage]) // microbatches

    def has_depth(self, in_flight: Sequence[int], microbatches: int) -> bool:
        """Whether the policy is defined for these numbers of forwards in flight, by stage."""
        if self.straight and list(in_flight) != _noam(len(in_flight)):
            return False
        return not self.accumulates or in_flight[0] <= microbatches

    def check(
        self, rule: Rule, in_flight: Sequence[int], microbatches: int, replicas: Sequence[int]
    ) -> None:
        """Raise `ScheduleError` if the policy does not fit a rule, or these numbers."""
        self.check_rule(rule)
        if self.accumulates and not self.has_depth(in_flight, microbatches):
            raise ScheduleError(
                f"{self.name} accumulates at least as many micro-batches as are in flight, but "
                f"there are {microbatches} in a mini-batch and {in_flight[0]} in flight; use "
                f"{in_flight[0]} micro-batches or more"
            )
        if not self.straight:
            return
        if microbatches != 1 or not self.has_depth(in_flight, microbatches):
            raise ScheduleError(
                f"{self.name} is defined for mini-batches of one micro-batch with "
                f"{_noam(len(in_flight))} in flight, not for mini-batches of {microbatches} "
                f"with {list(in_flight)} in flight"
            )
        if max(replicas, default=1) > 1:
            raise ScheduleError(
                f"{self.name} is defined for stages on one device each, not for {list(replicas)} "
                "replicas; use weights='pipeoptim'"
            )

    def check_rule(self, rule: Rule) -> None:
        """Raise `ScheduleError` if the policy does not fit a rule."""
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


def policy_names() -> list[str]:
    """Return the names of all policies for asynchronous schedules."""
    return [policy.name for policy in _policies.values() if not policy.flushes]


def policy_of(name: str | WeightPolicy) -> WeightPolicy:
    """Return the policy with this name, or `name` if it is a policy. Raises `ScheduleError` for an
    unknown name."""
    if isinstance(name, WeightPolicy):
        return name
    if name not in _policies:
        raise ScheduleError(f"no weight policy {name!r}; {choices(name, _policies)}")
    return _policies[name]


def policy_for(rule: Rule, name: str = "auto") -> WeightPolicy:
    """Return the policy with this name; "auto" stands for the rule's default. Raises
    `ScheduleError` if the policy does not fit the rule."""
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
