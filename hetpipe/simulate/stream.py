"""Stream: the time between two mini-batches of a pipeline that never drains.

Without a flush, every action waits only for earlier actions, in the same pattern for each
mini-batch. Let x be the end times of all actions of some consecutive mini-batches, as many as are
in flight, and y the same, T mini-batches later. The actions after y follow from y as those after x
follow from x. So the period P of the endless stream is between the least and the largest element
of (y - x) / T (Collatz and Wielandt, with sums and maxima for products and sums).

The last mini-batches of a simulated stream meet no later forwards and are faster. They do not
count.
"""

from __future__ import annotations

from math import inf

import numpy as np

from hetpipe.schedule.codes import CODES, Array
from hetpipe.simulate.timeline import SpanColumns, Timeline

EXACT = 1e-9
"""Relative difference below which both bounds of the period count as equal."""


def period_s(timeline: Timeline, mini_batches: int, turn: int, reach: int) -> tuple[float, float]:
    """Return bounds of the seconds between two mini-batches of an endless stream.

    `timeline` has `mini_batches` of the stream, beginning with an empty pipeline. Its pattern
    repeats every `turn` mini-batches, and no action waits for one more than `reach` mini-batches
    earlier. The bounds are 0 and infinity if the timeline is too short.
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
    """Return the ends of all actions: a row per mini-batch, a column per kind of action."""
    codes, stages, numbers, ends_s = _columns(timeline)
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
