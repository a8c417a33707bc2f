"""Unused devices: says why a plan leaves out devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.errors import PlanError
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_pipeline
from hetpipe.plan.proposal import PlannerOptions, Tables
from hetpipe.plan.search import FREE_ORDER_DEVICES
from hetpipe.words import words


def with_notes(plan: Plan, tables: Tables, devices: Sequence[str], options: PlannerOptions) -> Plan:
    """Return the plan with a note for each of `devices` that it omits.

    The note compares it with the fastest plan by these options that has a stage on each of its
    devices and on the omitted one. If many are omitted, one note names them.
    """
    unused = [device for device in devices if device not in plan.all_devices]
    if len(unused) > FREE_ORDER_DEVICES:
        return replace(plan, notes=(*plan.notes, f"{words(unused)} are left out"))
    return replace(
        plan, notes=(*plan.notes, *(_note(plan, tables, device, options) for device in unused))
    )


def _note(plan: Plan, tables: Tables, device: str, options: PlannerOptions) -> str:
    used = dict.fromkeys((*plan.all_devices, device))
    try:
        rival = make_pipeline(tables, list(used), options)
    except PlanError:
        return f"{device} is left out: no plan with a stage on each of {words(used)} is possible"
    return (
        f"{device} is left out: a step without it is predicted to take {1e3 * plan.step_s:.2f} ms, "
        f"with it {1e3 * rival.step_s:.2f} ms at best, with a stage on each of "
        f"{words(rival.all_devices)}"
    )
