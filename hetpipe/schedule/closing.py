"""Closing: the last operation of each stage on a micro-batch; then its data can be freed."""

from __future__ import annotations

from hetpipe.schedule.action import PER_MINI_BATCH, TIED, Op, Schedule

Closing = frozenset[tuple[int, Op]]
"""Stage and operation."""


def closing(schedule: Schedule) -> Closing:
    """Return the last operation of each stage on any of its micro-batches."""
    last: dict[int, dict[int, Op]] = {}
    for action in (action for row in schedule for action in row):
        message = action.message
        if action.op not in PER_MINI_BATCH and (message is None or message.kind not in TIED):
            last.setdefault(action.stage, {})[action.number] = action.op
    return frozenset((stage, op) for stage, ops in last.items() for op in ops.values())
