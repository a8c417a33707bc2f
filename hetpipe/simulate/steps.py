"""Steps: the common data of all actions of one operation at one stage, for the clock.

These actions differ only in their numbers. So the clock computes the costs of an operation once,
and identifies a message by one integer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.schedule.action import AFTER_SUMS, MOST_NUMBER, MOST_STAGE, TIED, Action, Message, Op
from hetpipe.simulate.times import StageTimes, Transfer

COMPUTE, SEND, RECEIVE, SUM = range(4)
"""The effect of an action on its worker."""

_SENDS = {
    Op.FORWARD: Op.SEND_FORWARD,
    Op.BACKWARD: Op.SEND_BACKWARD,
    Op.BACKWARD_INPUT: Op.SEND_BACKWARD,
}
_KINDS = "FBKVAGP"  # of messages


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of one stage."""

    code: int
    compute_s: float  # of a pass or an update
    transfer: Transfer | None  # of a message or a sum; None if it depends on the number
    chunks: float  # in which the stage's results leave
    after_sums: bool  # whether it waits for the sums that began before it
    sent_by: Op | None  # the operation that sends the result of a pass
    first_key: int  # key of the message, or the sum, with number 0
    key_step: int  # difference of keys from number to number

    def key(self, number: int) -> int:
        """Return the key of the message, or the sum, with this number."""
        return self.first_key + self.key_step * number


class Steps(dict[tuple[Op, int], Step]):
    """Steps by operation and stage, each made at its first use."""

    def __init__(self, times: StageTimes) -> None:
        super().__init__()
        self._times = times

    def __missing__(self, key: tuple[Op, int]) -> Step:
        step = self[key] = self._step(*key)
        return step

    def _step(self, op: Op, stage: int) -> Step:
        times, first, second = self._times, Action(stage, op, 0), Action(stage, op, 1)
        compute_s, transfer = 0.0, None
        first_key, key_step = stage * (MOST_NUMBER + 1), 1
        if op.is_compute:
            code, compute_s = COMPUTE, times.compute_s(first)
        elif op is Op.ALL_REDUCE:
            code, transfer = SUM, times.sum_of(stage)
        else:
            code = SEND if op.is_send else RECEIVE
            first_key, key_step = _key(first), _key(second) - _key(first)
            message = first.message
            if op.is_send and message is not None and message.kind not in TIED:
                transfer = times.transfer(message)
        chunks = times.chunks[stage] if times.chunks else 1
        after_sums = op in AFTER_SUMS
        return Step(
            code, compute_s, transfer, chunks, after_sums, _SENDS.get(op), first_key, key_step
        )


def _key(action: Action) -> int:
    """Return the key of an action's message; it grows linearly with the action's number."""
    source, target, kind, number = action.message or Message(0, 0, "", 0)
    way = (source * (MOST_STAGE + 2) + target) * len(_KINDS) + _KINDS.index(kind)
    return way * (MOST_NUMBER + 1) + number
