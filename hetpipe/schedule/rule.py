"""Rule: a schedule's name, generator and traits.

A rule is registered once. Code reads a trait from the rule and never compares names, so users'
schedules can have all traits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.interleaved import interleaved
from hetpipe.schedule.straight import (
    data_parallel,
    fbp,
    gpipe,
    gpipe_with_loss,
    naive,
    one_f_one_b,
    one_f_one_b_sno,
    one_f_one_b_so,
    pipedream,
)
from hetpipe.schedule.turns import asp
from hetpipe.schedule.zerobubble import zb_h1, zb_v
from hetpipe.words import choices

Passes = Callable[..., Schedule]
"""(stages, micro-batches, in flight per stage or None) -> the passes of each worker, in order.

Under a schedule without flushes, the micro-batches belong to several mini-batches. If a worker may
have several stages, the number of workers is a fourth argument.
"""

Generator = TypeVar("Generator", bound=Passes)


@dataclass(frozen=True)
class Rule:
    """A schedule. `passes` orders forwards and backwards; `generate` adds all other actions."""

    name: str
    passes: Passes
    flushes: bool = True
    """Whether a mini-batch ends with its update before the next mini-batch begins."""
    stages_per_worker: int = 1
    """The number of stages that a planner gives each worker. If it is above 1, a user may choose
    another number."""
    averages: bool = True
    """Whether replicas that take turns apply the mean gradient of a round of mini-batches. If not,
    they apply the gradient of each mini-batch separately."""
    replicates: bool = False
    """Whether every worker has every stage: data parallelism."""
    any_depth: bool = False
    """Whether a planner may choose how many micro-batches each stage keeps in flight."""

    @property
    def several_stages(self) -> bool:
        """Whether a worker may have several stages."""
        return self.stages_per_worker > 1

    def rows(
        self,
        stages: int,
        microbatches: int,
        in_flight: Sequence[int] | None = None,
        workers: int | None = None,
    ) -> Schedule:
        """Return the passes of each worker (default: one per stage) in order."""
        more = (workers or stages,) if self.several_stages else ()
        return self.passes(stages, microbatches, in_flight, *more)

    def mini_batches_per_update(self, replicas: Sequence[int]) -> tuple[int, ...]:
        """Return how many mini-batches an update applies, by stage: the stage's number of replicas
        if they apply the mean of a round, otherwise 1."""
        in_rounds = not self.flushes and self.averages
        return tuple(count if in_rounds else 1 for count in replicas)


_rules: dict[str, Rule] = {}


def register_rule(rule: Rule) -> Rule:
    """Register a rule under its name. Raises `ScheduleError` if another rule has the name."""
    if _rules.setdefault(rule.name, rule) != rule:
        raise ScheduleError(f"schedule {rule.name!r} is registered already; choose another name")
    return rule


def register_schedule(
    name: str, *, asynchronous: bool = False, chunked: bool = False, averages: bool = True
) -> Callable[[Generator], Generator]:
    """Return a decorator that registers a generator as schedule `name`.

    An `asynchronous` schedule does not flush after a mini-batch: each stage updates its weights as
    soon as it has run the last backward of a mini-batch. A `chunked` schedule may give a worker
    several stages. For `averages` see `Rule`. Raises `ScheduleError` if another generator has the
    name.
    """

    def register(generator: Generator) -> Generator:
        register_rule(
            Rule(
                name,
                generator,
                flushes=not asynchronous,
                stages_per_worker=2 if chunked else 1,
                averages=averages,
            )
        )
        return generator

    return register


def rule_of(schedule: str | Rule) -> Rule:
    """Return the rule with this name. Raises `ScheduleError` for an unregistered name."""
    if isinstance(schedule, Rule):
        return schedule
    rule = _rules.get(schedule)
    if rule is None:
        raise ScheduleError(f"no schedule {schedule!r}; {choices(schedule, schedule_names())}")
    return rule


def schedule_names() -> list[str]:
    """Return the names of the registered schedules, in alphabetical order."""
    return sorted(_rules)


def is_asynchronous(name: str) -> bool:
    """Whether the schedule of this name has no flush; False for an unregistered name."""
    return name in _rules and not _rules[name].flushes


ONE_F_ONE_B = register_rule(Rule("1f1b", one_f_one_b, any_depth=True))
GPIPE = register_rule(Rule("gpipe", gpipe))
GPIPE_WITH_LOSS = Rule("gpipe", gpipe_with_loss)
"""`GPIPE` for a loss over whole mini-batches. A plan names both `gpipe`."""
for _rule in (
    Rule("naive", naive),
    Rule("1f1b-sno", one_f_one_b_sno),
    Rule("1f1b-as", one_f_one_b_sno),
    Rule("1f1b-so", one_f_one_b_so),
    Rule("fbp", fbp),
    Rule("zb-h1", zb_h1),
    Rule("zb-v", zb_v, stages_per_worker=2),
    Rule("interleaved", interleaved, stages_per_worker=2),
    Rule("data-parallel", data_parallel, stages_per_worker=2, replicates=True),
    Rule("pipedream", pipedream, flushes=False),
    Rule("asp", asp, flushes=False, averages=False),
):
    register_rule(_rule)
