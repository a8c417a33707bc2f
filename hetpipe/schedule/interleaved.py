"""Interleaved 1F1B: several stages per worker, in rounds (Narayanan et al., SC'21, section 2.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Op, Schedule
from hetpipe.schedule.columns import Turns, in_turns


def interleaved(
    stages: int, microbatches: int, in_flight: Sequence[int] | None, workers: int
) -> Schedule:
    """1F1B with v = N/D stages on each of D workers (here D = 2, N = 4, M = 2; B as long as F).

        0  0F0 0F1 2F0 2F1  .  2B0  .  2B1 0B0 0B1
        1   .  1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1

    Stage n is on worker n mod D. A worker runs D micro-batches through one of its stages, then the
    same micro-batches through its next stage. More stages per worker make the bubble smaller:
    (D-1)/(vM+D-1) of the step. Raises `ScheduleError` if D does not divide N and M.
    """
    for name, count in (("stages", stages), ("micro-batches", microbatches)):
        if count % workers:
            below = count - count % workers
            fitting = [str(number) for number in (below, below + workers) if number]
            raise ScheduleError(
                f"interleaved needs a multiple of its {workers} workers, not {count} {name}; "
                f"use {' or '.join(fitting)}"
            )
    rows, times = np.arange(workers)[:, None], np.arange(stages // workers * microbatches)
    chunks = times // workers % (stages // workers)
    numbers = times // stages * workers + times % workers
    warm_up = np.minimum(2 * (workers - rows - 1) + stages - workers, len(times))
    return in_turns(
        (
            Turns(Op.FORWARD, -warm_up, rows + workers * chunks, numbers),
            Turns(Op.BACKWARD, 0 * rows, rows + stages - workers * (1 + chunks), numbers),
        ),
        len(times),
    )
