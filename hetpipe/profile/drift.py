"""Drift: how much slower or faster devices have become since their costs were measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from hetpipe.cost.probe import Drift, drift
from hetpipe.cost.table import CostTable
from hetpipe.plan.interval import interval_s
from hetpipe.plan.pricing import predicted_step_s
from hetpipe.profile.probing import Probes

if TYPE_CHECKING:
    from hetpipe.cost.probe import Probe
    from hetpipe.crew.crew import Crew
    from hetpipe.plan.plan import Plan, StagePlan

TURNS = 5
"""The number of probes whose median is compared with an earlier probe."""


@dataclass(frozen=True)
class Correction:
    """A plan's predicted step: as planned, and corrected for the drift since the profile."""

    raw_s: float
    corrected_s: float
    interval_s: tuple[float, float] | None  # bounds of the corrected step
    drifts: dict[str, float]  # factor by member; a member without a probe is absent
    by_passes: bool = False
    """Whether the drifts come from the training's last passes, not from probes."""

    def scaled(self, factor: float) -> Correction:
        """Return the correction with the corrected step and its interval multiplied."""
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
            f"{'by the last passes of the training' if self.by_passes else 'for drift'} "
            f"{1e3 * self.corrected_s:.1f} ms{span}; {factors}"
        )


def mean_correction(corrections: Sequence[Correction]) -> Correction:
    """Return the mean of several corrections of one plan."""
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
    """Return the probes in a table, by device; a device without a probe is absent."""
    return {id: cost.probe for id, cost in table.devices.items() if cost.probe is not None}


def probe_again(crew: Crew, table: CostTable, members: Collection[str]) -> dict[str, Probe]:
    """Probe these members together, with the programs of the probes in the table."""
    like = {id: probe for id, probe in probes_of(table).items() if id in members}
    if not like:
        return {}
    with Probes(crew, list(like), like) as probes:
        return probes.together(TURNS)


def drifts_since(table: CostTable, now: Mapping[str, Probe], count: int) -> dict[str, Drift]:
    """Return the drifts of devices from the table's probes to the probes `now`.

    `count` devices were probed together. Raises `CostError` if a device's two probes ran different
    programs.
    """
    devices = table.beside(count).devices
    return {
        id: drift(then, probe)
        for id, probe in now.items()
        if id in devices and (then := devices[id].probe) is not None
    }


def correct_for_drift(plan: Plan, table: CostTable, now: Mapping[str, Probe]) -> Correction:
    """Return a plan's prediction, corrected by the probes `now` of the plan's devices.

    `table` has the costs with which the plan was made. Without probes nothing is corrected.
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
    """Probe the plan's devices, and return the correction by `correct_for_drift`."""
    return correct_for_drift(plan, table, probe_again(crew, table, plan.all_devices))


def corrected_by(plan: Plan, factors: Mapping[str, float], present: CostTable) -> Correction:
    """Return the prediction for a plan without replicas, corrected by the training's last passes.

    `factors` has, by device, the measured seconds of its passes divided by the predicted ones.
    `present` has the costs multiplied by these factors.
    """
    used = {id: factors[id] for id in plan.all_devices}
    step_s = predicted_step_s(plan, present)
    return Correction(plan.step_s, step_s, interval_s(plan, present), used, by_passes=True)


def _slower(stage: StagePlan, factors: Mapping[str, float]) -> StagePlan:
    """Multiply the times of a stage with replicas by the replicas' largest drift. For other stages,
    the costs of the device have the drift already."""
    if len(stage.devices) == 1:
        return stage
    factor = max(factors.get(device, 1.0) for device in stage.devices)
    return replace(
        stage,
        forward_s=factor * stage.forward_s,
        backward_s=factor * stage.backward_s,
        update_s=factor * stage.update_s,
    )
