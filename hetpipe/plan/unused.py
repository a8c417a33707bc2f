"""Unused devices: says why a plan leaves out devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetpipe.plan.plan import Plan
from hetpipe.words import words


def with_notes(plans: Sequence[Plan], devices: Sequence[str]) -> Plan:
    """Return the first of `plans`, the fastest, with a note for each of `devices` that it omits.

    `plans` are ranked, as `explore` returns them.
    """
    best = plans[0]
    unused = [device for device in devices if device not in best.all_devices]
    return replace(best, notes=(*best.notes, *(_note(plans, device) for device in unused)))


def _note(plans: Sequence[Plan], device: str) -> str:
    best = plans[0]
    rival = next((plan for plan in plans if device in plan.all_devices), None)
    if rival is None:
        return f"{device} is left out: no plan with it is possible"
    return (
        f"{device} is left out: a step without it is predicted to take {1e3 * best.step_s:.2f} ms, "
        f"with it {1e3 * rival.step_s:.2f} ms at best, on {words(rival.all_devices)}"
    )
