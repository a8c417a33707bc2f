"""Earlier plans: a pipeline starts with the plan of an earlier pipeline, unless a new plan is
clearly better.

The costs of two starts differ by noise and drift, so the faster of two nearly equal plans may
change from one start to the next. The earlier plan's programs are already compiled and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hetpipe.cost.table import CostTable
from hetpipe.errors import HetpipeError
from hetpipe.plan.interval import with_interval
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, nearest_table
from hetpipe.profile import cache

GAIN = 0.05
"""A new plan must save at least this share of the earlier plan's step."""


@dataclass(frozen=True)
class EarlierPlans:
    """The plans of earlier pipelines with equal `parts`: all facts that decide costs."""

    parts: Mapping[str, object]

    def keep(self, plan: Plan, asked: Mapping[str, object]) -> None:
        """Store a plan for later pipelines with these options."""
        cache.store(self._entry(plan.mini_batch, asked), plan.to_json())

    def kept(
        self, best: Plan, tables: Mapping[int, CostTable], asked: Mapping[str, object]
    ) -> Plan | None:
        """Return the earlier plan for these options, priced by `tables`.

        None if there is no such plan, if it no longer fits, or if `best` is faster by `GAIN`.
        """
        earlier = _load(self._entry(best.mini_batch, asked), tables)
        if earlier is None or best.step_s <= (1 - GAIN) * earlier.step_s:
            return None
        return replace(earlier, lower_bound_s=best.lower_bound_s)

    def _entry(self, mini_batch: int, asked: Mapping[str, object]) -> str:
        return cache.key({**self.parts, "mini_batch": mini_batch, "asked": dict(asked)})


def _load(entry: str, tables: Mapping[int, CostTable]) -> Plan | None:
    content = cache.load(entry)
    if content is None:
        return None
    try:
        return _priced_again(Plan.from_json(content), tables)
    except (HetpipeError, KeyError):  # an old format, unknown sizes, or not enough memory
        return None


def _priced_again(plan: Plan, tables: Mapping[int, CostTable]) -> Plan:
    """Return the plan priced by these tables, with the same shares of replicas.

    Raises `KeyError` for a size of micro-batches without costs, and `PlanError`.
    """
    priced = Priced(tables, PlannerOptions(plan.mini_batch, weights=plan.weights))
    alone = max(plan.replicas) == 1  # without replicas no time is interpolated
    table = tables[plan.share_samples] if alone else nearest_table(tables, plan)
    return with_interval(priced.plan_again(plan), table)
