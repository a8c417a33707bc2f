"""How far the devices of a crew have drifted since their costs were measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from hetpipe.cost.probe import Drift, drift
from hetpipe.cost.table import CostTable
from hetpipe.plan.interval import interval_s
from hetpipe.plan.pricing import predicted_step_s
from hetpipe.profile.probe import Probes

if TYPE_CHECKING:
    from hetpipe.cost.probe import Probe
    from hetpipe.crew.crew import Crew
    from hetpipe.plan.plan import Plan, StagePlan

TURNS = 5
"""Takes of a probe that is compared with an earlier one."""


@dataclass(frozen=True)
class Correction:
    """A plan's step as predicted when it was made, and by costs corrected for drift since."""

    raw_s: float
    corrected_s: float
    interval_s: tuple[float, float] | None  # of the corrected one
    drifts: dict[str, float]  # by member; those without a probe are left out
    by_passes: bool = False
    """Whether the drifts come from the training's last passes, not from probes."""

    def scaled(self, factor: float) -> Correction:
        """The same prediction, with its interval, multiplied. The raw one stays."""
        interval_s = self.interval_s
        if interval_s is not None:
            interval_s = factor * interval_s[0], factor * interval_s[1]
        return replace(self, corrected_s=factor * self.corrected_s, interval_s=interval_s)

    def __str__(self) -> str:
        if not self.drifts:
            return f"predicted {1e3 * self.raw_s:.1f} ms (no device has a probe to correct it by)"
        factors = ", ".join(f"{member} x {factor:.2f}" for member, factor in self.drifts.items())
        span = (
            ""
            if self.interval_s is None
            else " ({:.1f} .. {:.1f})".format(*(1e3 * end_s for end_s in self.interval_s))
        )
        return (
            f"predicted {1e3 * self.raw_s:.1f} ms, corrected "
            f"{'by its last passes' if self.by_passes else 'for drift'} "
            f"{1e3 * self.corrected_s:.1f} ms{span}; {factors}"
        )


def mean_correction(corrections: Sequence[Correction]) -> Correction:
    """The mean of corrections of one plan, taken at several times."""
    first = corrections[0]
    intervals = [one.interval_s for one in corrections if one.interval_s is not None]
    return Correction(
        first.raw_s,
        fmean(one.corrected_s for one in corrections),
        (fmean(lo for lo, _ in intervals), fmean(hi for _, hi in intervals)) if intervals else None,
        {id: fmean(one.drifts[id] for one in corrections) for id in first.drifts},
        all(one.by_passes for one in corrections),
    )


def probes_of(table: CostTable) -> dict[str, Probe]:
    """The probes that were taken with a table's costs; devices without one are left out."""
    return {id: cost.probe for id, cost in table.devices.items() if cost.probe is not None}


def probe_again(crew: Crew, table: CostTable, members: Collection[str]) -> dict[str, Probe]:
    """Probes of these members now, all at once, of the sizes that the table's have."""
    like = {id: probe for id, probe in probes_of(table).items() if id in members}
    if not like:
        return {}
    with Probes(crew, list(like), like) as probes:
        return probes.together(TURNS)


def drifts_since(table: CostTable, now: Mapping[str, Probe], count: int) -> dict[str, Drift]:
    """The drifts of devices from the table's probes to those of `now`.

    `count` devices took theirs at once. Raises `CostError` for probes of other programs.
    """
    devices = table.beside(count).devices
    return {
        id: drift(then, probe)
        for id, probe in now.items()
        if id in devices and (then := devices[id].probe) is not None
    }


def corrected(plan: Plan, table: CostTable, now: Mapping[str, Probe]) -> Correction:
    """The prediction for a plan made by `table`, if its devices, all at once, have these probes.

    Without probes it is the plan's own.
    """
    if not now:
        return Correction(plan.step_s, plan.step_s, plan.interval_s, {})
    count = len(set(plan.all_devices))
    drifts = drifts_since(table, now, count)
    factors = {id: drift.factor for id, drift in drifts.items()}
    present = table.beside(count).drifted(drifts)
    slower = replace(plan, stages=tuple(_slower(stage, factors) for stage in plan.stages))
    step_s = predicted_step_s(slower, present)
    return Correction(plan.step_s, step_s, interval_s(slower, present), factors)


def corrected_now(crew: Crew, plan: Plan, table: CostTable) -> Correction:
    """The prediction for a plan made by `table`, corrected by probes that are taken now."""
    return corrected(plan, table, probe_again(crew, table, plan.all_devices))


def corrected_by(plan: Plan, factors: Mapping[str, float], present: CostTable) -> Correction:
    """Return the prediction for a plan without replicas, corrected by passes.

    `factors` are measured over predicted seconds of passes by device, and `present` the costs
    multiplied by them.
    """
    used = {id: factors[id] for id in plan.all_devices}
    step_s = predicted_step_s(plan, present)
    return Correction(plan.step_s, step_s, interval_s(plan, present), used, by_passes=True)


def _slower(stage: StagePlan, factors: Mapping[str, float]) -> StagePlan:
    """A stage with replicas after a drift. Its times are those of the slowest for its own rows."""
    if len(stage.devices) == 1:
        return stage
    factor = max(factors.get(device, 1.0) for device in stage.devices)
    return replace(
        stage,
        forward_s=factor * stage.forward_s,
        backward_s=factor * stage.backward_s,
        update_s=factor * stage.update_s,
    )
