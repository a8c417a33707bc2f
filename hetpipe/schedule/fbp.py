"""FBP: forwards and backwards at once, on two lanes of each worker (BaPipe, section 3.2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.straight import depths


def fbp(stages: int, microbatches: int, in_flight: Sequence[int] | None = None) -> Schedule:
    """BaPipe's FBP-AS, for asynchronous devices (figure 5b; 2 stages, 3 micro-batches, B = F).

        worker 0 lane 0  F0 F1 F2  .  .  .  .  .
        worker 0 lane 1   .  .  .  . B0  . B1 B2
        worker 1 lane 0   . F0 F1 F1 F2 F2  .  .
        worker 1 lane 1   .  . B0 B0 B1 B1 B2  .

    A pass takes twice as long beside another one. Row 2n has the forwards of stage n, row 2n+1 its
    backwards. Stage n keeps min(2(N-n), M) micro-batches, or fewer if `in_flight` requires: a
    forward waits for a vacant place.
    """
    bounds = depths(stages, 2, in_flight)
    return tuple(
        tuple(lane(stage, microbatches, bounds[stage]))
        for stage in range(stages)
        for lane in (_forwards, _backwards)
    )


def _forwards(stage: int, microbatches: int, bound: int) -> Iterator[Action]:
    for number in range(microbatches):
        if number >= bound:
            yield Action(stage, Op.RECV_VACANT, number - bound)
        yield Action(stage, Op.FORWARD, number)
        yield Action(stage, Op.SEND_KEPT, number)


def _backwards(stage: int, microbatches: int, bound: int) -> Iterator[Action]:
    for number in range(microbatches):
        yield Action(stage, Op.RECV_KEPT, number)
        yield Action(stage, Op.BACKWARD, number)
        if number + bound < microbatches:
            yield Action(stage, Op.SEND_VACANT, number)
