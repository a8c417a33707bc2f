"""Generation: makes a complete schedule from a rule's passes.

A rule only orders forwards and backwards. This module adds the actions that follow from that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.codes import are
from hetpipe.schedule.columns import columns_of
from hetpipe.schedule.complete import (
    WEIGHTS,
    Pair,
    Tied,
    complete_passes,
    tied_pairs,
    with_tied,
    with_transfers,
    with_updates,
)
from hetpipe.schedule.lanes import laned_stages
from hetpipe.schedule.rule import Rule, rule_of
from hetpipe.schedule.turns import in_turn, noam, one_by_one
from hetpipe.schedule.validate import validate

KEPT = 128  # number of remembered schedules, the most recently used ones


def generate(
    schedule: str | Rule,
    stages: int,
    microbatches: int,
    *,
    in_flight: Sequence[int] | None = None,
    tied: Tied = (),
    mini_batches: int = 1,
    workers: int | None = None,
    replicas: Sequence[int] = (),
) -> Schedule:
    """Return the complete, validated schedule: passes, transfers, tied parameters and updates.

    A receive stands before the pass that reads the message, a send after the pass that makes the
    message. `tied` has the stages that share parameters; an owner and another stage exchange all
    their tied parameters as one message in each direction. `microbatches` is the number in one
    mini-batch. Without a flush, the schedule has any number of `mini_batches`; with a flush, it has
    one. Each stage has its own worker, unless the rule lets a worker have several stages: then
    `workers` is the number of workers. `replicas` has the number of replicas of each stage (default
    1). All replicas run the stage's row; without flushes they take turns, and each has its own row,
    see `hetpipe.schedule.turns`. `in_flight` has, for each stage, the most micro-batches in flight
    at one replica. Calls with equal arguments return the same object. Raises `ScheduleError` for an
    unknown name, impossible numbers or an invalid schedule.
    """
    rule = rule_of(schedule)
    depths = None if in_flight is None else tuple(in_flight)
    question = _Question(
        rule,
        stages,
        microbatches,
        depths,
        mini_batches,
        stages if workers is None else workers,
        tuple(replicas),
    )
    question.check()
    return _generate(question, tuple(tied_pairs(stages, tied)))


@dataclass(frozen=True)
class _Question:
    """All arguments of a schedule except the stages that share parameters."""

    rule: Rule
    stages: int
    microbatches: int
    in_flight: tuple[int, ...] | None
    mini_batches: int
    workers: int
    replicas: tuple[int, ...]

    def check(self) -> None:
        """Raise `ScheduleError` for impossible numbers."""
        name, stages, in_flight = self.rule.name, self.stages, self.in_flight
        if stages < 1 or self.microbatches < 1:
            raise ScheduleError(
                f"{stages} stages, {self.microbatches} micro-batches: give at least 1 of each"
            )
        if in_flight is not None and (len(in_flight) != stages or min(in_flight) < 1):
            raise ScheduleError(
                f"in_flight {list(in_flight)}: give one number, at least 1, for each of {stages} "
                "stages"
            )
        if self.mini_batches < 1:
            raise ScheduleError(f"{self.mini_batches} mini-batches: must be 1 or more")
        if self.mini_batches > 1 and self.rule.flushes:
            raise ScheduleError(
                f"{self.mini_batches} mini-batches: {name} flushes after each; give one at a time"
            )
        several = self.rule.several_stages
        if self.workers != stages and not (several and 1 <= self.workers <= stages):
            raise ScheduleError(
                f"{stages} stages on {self.workers} workers: {name} takes "
                + ("at least one stage per worker" if several else "one stage per worker")
            )

    def passes(self, microbatches: int, in_flight: Sequence[int] | None) -> Schedule:
        """Return the rule's passes, in order."""
        return self.rule.rows(self.stages, microbatches, in_flight, self.workers)


@lru_cache(KEPT)
def _generate(question: _Question, pairs: tuple[Pair, ...]) -> Schedule:
    rule, stages, replicas = question.rule, question.stages, question.replicas
    microbatches, mini_batches = question.microbatches, question.mini_batches
    if rule.flushes:
        passes = question.passes(microbatches, question.in_flight)
        schedule = complete_passes(columns_of(passes), stages, pairs, replicas)
        validate(schedule, microbatches, question.in_flight)
        return schedule
    _check_pairs(pairs, rule, replicas or (1,) * stages)
    take_turns = max(replicas, default=1) > 1
    rows = _in_turn(question) if take_turns else _updating(question)
    rows = tuple(tuple(with_tied(row, microbatches, mini_batches, pairs)) for row in rows)
    schedule = with_transfers(columns_of(rows), stages)
    in_turn_replicas = replicas if take_turns else ()
    validate(
        schedule, microbatches, question.in_flight, mini_batches, in_turn_replicas, flushes=False
    )
    return schedule


def _check_pairs(pairs: Sequence[Pair], rule: Rule, replicas: Sequence[int]) -> None:
    """Raise `ScheduleError` unless an asynchronous schedule can update the shared parameters."""
    for owner, other in pairs:
        if owner > other:
            raise ScheduleError(
                f"stage {owner} owns a parameter that stage {other} shares, but under {rule.name} "
                "the first stage with a parameter must own it"
            )
        for stage in (owner, other):
            if replicas[stage] > 1:
                raise ScheduleError(
                    f"stages {owner} and {other} share parameters, and stage {stage} has "
                    f"{replicas[stage]} replicas, which take turns under {rule.name}: give both "
                    "stages one device each, cut so that one stage has the parameters, or use a "
                    "synchronous schedule"
                )


def _updating(question: _Question) -> Schedule:
    """Return the passes of all mini-batches, with updates between them."""
    count = question.microbatches * question.mini_batches
    passes = question.passes(count, question.in_flight)
    return tuple(tuple(with_updates(row, question.microbatches)) for row in passes)


def _in_turn(question: _Question) -> Schedule:
    """Return the passes and updates of every replica; replicas take turns."""
    replicas, microbatches = question.replicas, question.microbatches
    depths = question.in_flight or noam(replicas)
    if question.rule.averages:
        return in_turn(
            lambda count: question.passes(count, depths),
            microbatches,
            question.mini_batches,
            replicas,
        )
    passes = question.passes(microbatches * question.mini_batches, depths)
    return one_by_one(passes, microbatches, question.mini_batches, replicas[0])


def max_in_flight(schedule: Schedule) -> list[int]:
    """Return, per stage, the most forwards that wait for their backward at any time. A backward in
    halves ends with W. If backwards are on another lane, a forward waits until the forwards' lane
    has received the message RV that its backward has ended."""
    columns = columns_of(schedule)
    codes, by_stage = columns.codes, np.argsort(columns.stages, kind="stable")
    in_lanes = np.isin(columns.stages, [*laned_stages(columns)])
    ends = np.where(in_lanes, are(codes, (Op.RECV_VACANT,)), are(codes, WEIGHTS))
    changes = (1 * are(codes, (Op.FORWARD,)) - ends)[by_stage]
    parts = np.split(changes, np.flatnonzero(np.diff(columns.stages[by_stage])) + 1)
    return [int(np.cumsum(part).max(initial=0)) for part in parts if len(part)]
