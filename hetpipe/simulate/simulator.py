"""Simulator: runs a schedule on a virtual clock.

The rules are the engine's:

- A worker runs its actions in order. A compute action holds the worker. A send is posted and costs
  the worker nothing. A receive holds the worker until the message has arrived.
- An edge is one direction between two workers. It carries one message at a time, in the order of
  posting. A message in chunks holds its edge from the first chunk until the last has left.
- A message is on its media while it is on its edge, without its latency. The messages on a medium
  share it: each has a speed of 1 / the largest number of messages on any of its media.
- The lanes of a worker run at once. While several compute, they share its speed evenly.
- A worker runs one sum over replicas at a time, beside the following passes. An update waits for
  the sums. If each replica has a row, a sum begins when all of them have reached it. A sum is on
  its media as one more message.
- A replica that sends a gradient to all the others uses a separate edge to each of them.

Two messages of 2 s each that meet on a bus, on separate edges; a column is half a second:

    a  ==----       = alone
    b    ----==     - together, at half the speed

Plain schedules need no clock (`hetpipe.simulate.walk`); all others use `hetpipe.simulate.clock`.
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
    """Return the timeline of one mini-batch, a row per lane. `workers` are their names, by default
    `worker 0`, ...

    The span of a compute action lasts while it holds the worker. The span of a send begins when the
    edge takes the message, the span of a receive when the worker reaches it; both end at the
    arrival. Raises `ScheduleError` if the schedule deadlocks, or if stages or names do not match
    `times`.
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
    """Return the spans of any schedule, by start, end and row. Raises `ScheduleError` for a
    deadlock."""
    clock = Clock(schedule, times, worker_of)
    clock.run()
    for row, action in sorted(clock.stuck.items()):
        raise ScheduleError(f"{names[row]} waits for ever in {action}")
    return tuple(sorted(map(Span._make, clock.spans), key=itemgetter(2, 3, 0)))
