"""Simulator: runs a schedule on a virtual clock.

The simulator follows the rules of a crew:

- A worker runs its actions in order. A compute action holds the worker. A send is posted and costs
  the worker nothing. A receive holds the worker until the message has arrived.
- An edge is one direction between two workers. It carries its messages one at a time, in the order
  in which they are posted. A message in chunks holds its edge until the last chunk has left.
- A message uses its media while it holds its edge, but not during its latency. The messages on a
  medium share it: a message's speed is 1 / the largest number of messages on any of its media.
- The lanes of a worker run in parallel. While several lanes compute, they share the worker's speed
  evenly.
- A worker runs one sum over replicas at a time, while it computes the following passes. An update
  waits for the sums. If each replica has a row, a sum begins when all these rows have reached the
  sum. A sum uses its media as a message does.
- A replica that sends a gradient to all other replicas uses a separate edge to each of them.

Example: two messages, of 2 s each if alone, on separate edges that share a bus. A column is half a
second.

    a  ==----       = alone
    b    ----==     - together, at half the speed

Plain schedules without shared media use `hetpipe.simulate.walk`, all others the `Clock`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import itemgetter

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import PEERS, Schedule
from hetpipe.schedule.codes import CODES, IS_TIED, Array
from hetpipe.schedule.columns import columns_of
from hetpipe.schedule.lanes import row_names, row_workers
from hetpipe.simulate.clock import Clock
from hetpipe.simulate.timeline import Span, SpanColumns, Timeline
from hetpipe.simulate.times import StageTimes
from hetpipe.simulate.walk import walk


def simulate(
    schedule: Schedule,
    times: StageTimes,
    *,
    workers: Sequence[str] = (),
    label: str = "predicted",
) -> Timeline:
    """Return the timeline of a schedule, with a row for each row of the schedule.

    `workers` are the names of the workers, by default `worker 0`, ... The span of a compute action
    lasts while the action holds the worker. The span of a send begins when the edge takes the
    message, the span of a receive when the worker reaches the receive. Both spans end when the
    message arrives; but if the message arrived before its receive, the receive's span has no
    length. Raises `ScheduleError` if the schedule deadlocks, if `times` has another number of
    stages, or if there is not one name for each worker.
    """
    schedule = columns_of(schedule)
    stages = 1 + int(schedule.stages.max(initial=-1))
    worker_of = row_workers(schedule)
    count = len(set(worker_of))
    if stages != len(times.forward_s) or len(workers) not in (0, count):
        raise ScheduleError(
            f"the schedule has {stages} stages on {count} workers, but there are times for "
            f"{len(times.forward_s)} stages and names for {len(workers) or count} workers"
        )
    names = row_names(worker_of, workers)
    plain = None if times.shares_media else walk(schedule, times)
    spans = _by_clock(schedule, times, worker_of, names) if plain is None else plain
    return Timeline(names, spans, label, times.step_overhead_s)


def _by_clock(
    schedule: Schedule, times: StageTimes, worker_of: Sequence[int], names: Sequence[str]
) -> tuple[Span, ...]:
    """Return the sorted spans of any schedule. Raises `ScheduleError` for a deadlock."""
    clock = Clock(schedule, times, worker_of)
    clock.run()
    for row, action in sorted(clock.stuck.items()):
        raise ScheduleError(f"{names[row]} waits for ever in {action}")
    return tuple(sorted(map(Span._make, clock.spans), key=itemgetter(2, 3, 0)))


EXACT = 1e-9  # relative difference up to which both bounds of the period count as equal


def period_s(timeline: Timeline, mini_batches: int, turn: int, reach: int) -> tuple[float, float]:
    """Return bounds of the seconds between two mini-batches of an endless stream.

    `timeline` has the first `mini_batches` of the stream, from an empty pipeline on. The pattern of
    the stream repeats every `turn` mini-batches, and no action waits for an action more than
    `reach` mini-batches earlier. The bounds are 0 and infinity if the timeline is too short.

    Without a flush, every action waits only for earlier actions, in the same pattern for each
    mini-batch. Let x be the end times of all actions of as many consecutive mini-batches as are in
    flight, and y the end times of these actions T mini-batches later. The actions after y follow
    from y as the actions after x follow from x. So the period of the endless stream is between the
    least and the largest element of (y - x) / T. (This is Collatz and Wielandt's theorem, with sums
    in the place of products and maxima in the place of sums.) The last mini-batches do not count:
    no forwards of later mini-batches delay them.
    """
    reach = -(-reach // turn) * turn
    ends_s = _by_mini_batch(timeline, mini_batches)
    last = mini_batches - reach
    later_s = ends_s[last - reach : last]
    low_s, high_s = 0.0, inf
    for shift in range(turn, last - reach + 1, turn):
        passed_s = (later_s - ends_s[last - reach - shift : last - shift]) / shift
        low_s, high_s = max(low_s, float(passed_s.min())), min(high_s, float(passed_s.max()))
        if high_s - low_s <= EXACT * high_s:
            break
    return low_s, high_s


def _by_mini_batch(timeline: Timeline, mini_batches: int) -> Array:
    """Return the end times of actions: a row per mini-batch, a column per action."""
    columns = _columns(timeline)
    # After the last mini-batch, stages still exchange tied parameters.
    after = IS_TIED[columns[0]] & (columns[2] >= PEERS * mini_batches)
    codes, stages, numbers, ends_s = (column[~after] for column in columns)
    kinds = codes * (1 + int(stages.max(initial=0))) + stages
    order = np.lexsort((ends_s, numbers, kinds))
    begins = np.flatnonzero(np.diff(kinds[order], prepend=-1))
    parts = np.split(ends_s[order], begins[1:])
    return np.concatenate(
        [part.reshape(mini_batches, -1) for part in parts if len(part) % mini_batches == 0], axis=1
    )


def _columns(timeline: Timeline) -> tuple[Array, Array, Array, Array]:
    """Return the operation's code, the stage, the number and the end of every action."""
    spans = timeline.spans
    if isinstance(spans, SpanColumns):
        return spans.schedule.codes, spans.schedule.stages, spans.schedule.numbers, spans.ends_s
    actions = [span.action for span in spans]
    return (
        np.array([CODES[action.op] for action in actions]),
        np.array([action.stage for action in actions]),
        np.array([action.number for action in actions]),
        np.array([span.end_s for span in spans]),
    )
