"""Script: a part of a schedule from the point of view of one worker, or of one of its lanes."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

from hetpipe.schedule.action import PER_MINI_BATCH, TIED, Action, Message, Schedule
from hetpipe.schedule.closing import Closing
from hetpipe.schedule.lanes import HAND_OVERS

ScriptStep = tuple[Action, Message | None]
"""An action, and the message that it sends or receives."""


@dataclass(frozen=True)
class Script:
    """The steps of a part. Numbers count from the mini-batch that begins it."""

    steps: tuple[ScriptStep, ...]
    arrivals: tuple[Message, ...]
    """The messages that others send to the worker meanwhile, each sender's in its order."""
    closing: Closing

    @classmethod
    def of(cls, schedule: Schedule, row: int, stages: Container[int], closing: Closing) -> Script:
        """Return the script of a row of a schedule. `stages` are the worker's stages."""
        sends = (a for cells in schedule for a in cells if a.op.is_send and a.op not in HAND_OVERS)
        messages = (action.message for action in sends)
        arrivals = tuple(m for m in messages if m is not None and m.target in stages)
        return cls(tuple((action, action.message) for action in schedule[row]), arrivals, closing)

    @property
    def actions(self) -> tuple[Action, ...]:
        """The actions, in order."""
        return tuple(action for action, _ in self.steps)

    def numbered(self, first: int, microbatches: int) -> Iterable[ScriptStep]:
        """Return the steps, numbered so that the script's mini-batch 0 is the stream's `first`."""
        if not first:
            return self.steps
        return (_renumber(action, message, first, microbatches) for action, message in self.steps)


def _renumber(action: Action, message: Message | None, first: int, microbatches: int) -> ScriptStep:
    if action.op in PER_MINI_BATCH:
        return replace(action, number=action.number + first), None
    if message is not None and message.kind in TIED:
        return action, message
    number = action.number + first * microbatches
    return replace(action, number=number), message and message._replace(number=number)
