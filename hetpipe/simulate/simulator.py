"""Simulator: a schedule on a virtual clock.

The rules are the engine's:

- A worker does its actions in order. A compute action holds the worker. A send is posted and costs
  the worker nothing. A receive holds the worker until the message has arrived.
- An edge is one direction between two workers. It carries one message at a time, in the order of
  posting. A message in chunks holds its edge from the first chunk until the last has left.
- A message is on its media while it is on its edge, without its latency. Those on a medium share it
  evenly: the speed of each is 1 / the greatest number of messages among its media.
- The lanes of a worker run at once. While several compute, each has an even share of its speed.
- A worker does one sum over replicas at a time, beside the passes that follow. An update waits for
  the sums. Where replicas have a row each, a sum begins when all of them have come to it.
  A sum is on its media as one more message.
- A replica that sends a gradient to all the others uses an edge of its own to each of them.

Two messages of 2 s each that meet on a bus, on edges of their own; a column is half a second:

    a  ==----       = alone
    b    ----==     - together, at half the speed

Plain schedules need no clock (`hetpipe.simulate.walk`), all others have `hetpipe.simulate.clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.columns import columns_of
from hetpipe.schedule.lanes import row_names, row_workers
from hetpipe.simulate.clock import Clock
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes
from hetpipe.simulate.walk import walk


def simulate(
    schedule: Schedule,
    times: StageTimes,
    *,
    workers: Sequence[str] = (),
    label: str = "predicted",
) -> Timeline:
    """The timeline of one mini-batch, a row per lane. `workers` names them; default `worker 0`, ...

    A compute action's span lasts while it holds the worker. A send's lasts from the moment when the
    edge takes the message to the arrival, a receive's from the moment when the worker comes to it
    to the arrival. Raises `ScheduleError` if the schedule deadlocks, or if stages or names do not
    match `times`.
    """
    stages = 1 + int(columns_of(schedule).stages.max(initial=-1))
    worker_of = row_workers(schedule)
    count = len(set(worker_of))
    if stages != len(times.forward_s) or len(workers) not in (0, count):
        raise ScheduleError(
            f"the schedule has {stages} stages on {count} workers, but there are times for "
            f"{len(times.forward_s)} stages and names for {len(workers) or count} workers"
        )
    names = row_names(schedule, workers)
    plain = None if times.shares_media else walk(schedule, times)
    spans = _by_clock(schedule, times, worker_of, names) if plain is None else plain
    return Timeline(names, spans, label, times.step_overhead_s)


def _by_clock(
    schedule: Schedule, times: StageTimes, worker_of: Sequence[int], names: Sequence[str]
) -> tuple[Span, ...]:
    """The spans of any schedule, by start, end and row. Raises `ScheduleError` for a deadlock."""
    clock = Clock(schedule, times, worker_of)
    clock.run()
    for row, action in sorted(clock.stuck.items()):
        raise ScheduleError(f"{names[row]} waits for ever in {action}")
    return tuple(sorted(map(Span._make, clock.spans), key=itemgetter(2, 3, 0)))
