"""Lanes: rows of one worker that run at the same time, each in its own order.

Forwards and backwards of a stage may be on two lanes; the rows that share this stage are the lanes
of one worker. With SK and RK a forward hands its kept tensors to its backward; SV and RV tell the
forwards' lane that a backward has ended, so that another forward may begin.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.codes import are
from hetpipe.schedule.columns import columns_of

HAND_OVERS = (Op.SEND_KEPT, Op.RECV_KEPT, Op.SEND_VACANT, Op.RECV_VACANT)


def laned_stages(schedule: Schedule) -> set[int]:
    """Return the stages whose forwards and backwards are on two lanes."""
    columns = columns_of(schedule)
    return set(columns.stages[are(columns.codes, HAND_OVERS)].tolist())


def row_workers(schedule: Schedule) -> tuple[int, ...]:
    """Return the worker of each row."""
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
    """Return the numbers of each worker's rows: one row, or one per lane."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row, worker in enumerate(row_workers(schedule)):
        rows[worker].append(row)
    return [tuple(rows[worker]) for worker in sorted(rows)]


def row_names(worker_of: Sequence[int], workers: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the name of each row: the name of its worker (default `worker 0`, ...), and the lane
    if the worker has several. `worker_of` is the result of `row_workers`."""
    lanes, names = Counter(worker_of), []
    seen: Counter[int] = Counter()
    for worker in worker_of:
        name = workers[worker] if workers else f"worker {worker}"
        names.append(name + (f" lane {seen[worker]}" if lanes[worker] > 1 else ""))
        seen[worker] += 1
    return tuple(names)
