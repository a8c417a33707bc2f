"""Earlier plans: a start uses the plan of an earlier start, unless a new plan is clearly better.

Costs of two starts differ by noise and drift, so two nearly equal plans may change places from one
start to the next. The programs of the earlier plan are on the disk; another plan must compile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_plan
from hetpipe.plan.replicated import replicated_again
from hetpipe.profile import cache

GAIN = 0.05
"""The least share of a step that a new plan must save."""


@dataclass(frozen=True)
class EarlierPlans:
    """The plans of starts with the same `parts`: everything that decides costs."""

    parts: Mapping[str, object]

    def settle(
        self, best: Plan, tables: Mapping[int, CostTable], asked: Mapping[str, object]
    ) -> Plan:
        """Return the earlier plan if it is still good, or else `best`, which is then stored."""
        kept = self.kept(best, tables, asked)
        if kept is None:
            cache.store(self._entry(best.mini_batch, asked), best.to_json())
        return kept or best

    def kept(
        self, best: Plan, tables: Mapping[int, CostTable], asked: Mapping[str, object]
    ) -> Plan | None:
        """Return the earlier plan for these options, with a new price. None if there is none, it
        no longer fits, or `best` saves more than `GAIN` of its step."""
        earlier = _load(self._entry(best.mini_batch, asked), tables)
        worse = earlier is not None and best.step_s <= (1 - GAIN) * earlier.step_s
        return None if worse else earlier

    def _entry(self, mini_batch: int, asked: Mapping[str, object]) -> str:
        return cache.key({**self.parts, "mini_batch": mini_batch, "asked": dict(asked)})


def _load(entry: str, tables: Mapping[int, CostTable]) -> Plan | None:
    content = cache.load(entry)
    if content is None:
        return None
    try:
        plan = Plan.from_json(content)
        if max(plan.replicas) > 1:
            return replicated_again(tables, plan)
        table = tables[-(-plan.mini_batch // plan.microbatches)]
        again = make_plan(
            table, plan.devices, mini_batch=plan.mini_batch, microbatches=plan.microbatches,
            schedule=plan.schedule, weights=plan.weights, cuts=plan.cuts,
        )  # fmt: skip
    except (HetpipeError, KeyError):  # an old format, or not enough memory
        return None
    return replace(again, origin=plan.origin)
