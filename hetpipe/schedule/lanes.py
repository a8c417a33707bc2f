"""Lanes: rows of one worker that run at once, each in its own order.

Forwards and backwards of a stage may be on two lanes, which hand micro-batches over by actions: K
gives the backward the tensors that a forward keeps, V gives back the place that is vacant again.
Rows that share such a stage are lanes of one worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.schedule.action import Op, Schedule

HAND_OVERS = (Op.SEND_KEPT, Op.RECV_KEPT, Op.SEND_VACANT, Op.RECV_VACANT)


def laned_stages(schedule: Schedule) -> set[int]:
    """The stages whose micro-batches are handed over between lanes."""
    return {a.stage for row in schedule for a in row if a.op in HAND_OVERS}


def row_workers(schedule: Schedule) -> tuple[int, ...]:
    """Per row, its worker."""
    laned = laned_stages(schedule)
    if not laned:
        return tuple(range(len(schedule)))
    home: dict[int, int] = {}
    workers: list[int] = []
    for row in schedule:
        shared = {a.stage for a in row} & laned
        new = max(workers, default=-1) + 1
        workers.append(min((home[stage] for stage in shared if stage in home), default=new))
        home.update(dict.fromkeys(shared, workers[-1]))
    return tuple(workers)


def worker_rows(schedule: Schedule) -> list[tuple[int, ...]]:
    """Per worker, its rows: one, or one per lane."""
    at = row_workers(schedule)
    return [tuple(row for row, w in enumerate(at) if w == worker) for worker in sorted(set(at))]


def row_names(schedule: Schedule, workers: Sequence[str] = ()) -> tuple[str, ...]:
    """Per row, the name of its worker (default `worker 0`), and its lane if there are several."""
    at = row_workers(schedule)
    return tuple(
        (workers[worker] if workers else f"worker {worker}")
        + (f" lane {at[:row].count(worker)}" if at.count(worker) > 1 else "")
        for row, worker in enumerate(at)
    )
