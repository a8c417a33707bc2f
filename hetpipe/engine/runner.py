"""Walks a worker's action list: the compute thread of one mini-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.cost.emulation import stretch
from hetpipe.engine.edges import Receiver, Sender, Span
from hetpipe.engine.messages import Step, StepReport
from hetpipe.engine.stage import Stage
from hetpipe.engine.transport import Tensor
from hetpipe.engine.wiring import TIED, TIED_GRAD, TIED_PARAM, Kind, Layout
from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Message, Op, Schedule


@dataclass(frozen=True)
class Script:
    """A schedule from one worker's point of view."""

    actions: tuple[Action, ...]
    messages: tuple[Message | None, ...]  # what each action sends or receives
    arrivals: dict[int, list[tuple[int, Message]]]  # per peer, in its order; index of my receive
    releases: dict[int, int]  # index of the last action with a micro-batch -> the micro-batch
    last_forward: int  # index; -1 if there is none

    @classmethod
    def of(cls, schedule: Schedule, stage: int) -> Script:
        """Raises `ScheduleError` if a message is not received, or a stage is not this worker's."""
        actions = schedule[stage]
        strange = next((action for action in actions if action.stage != stage), None)
        if strange is not None:
            raise ScheduleError(f"worker {stage} runs stage {stage} alone, but was given {strange}")
        messages = tuple(action.message for action in actions)
        receives = {messages[i]: i for i, a in enumerate(actions) if a.op.is_receive}
        arrivals: dict[int, list[tuple[int, Message]]] = {}
        for peer, theirs in enumerate(schedule):
            for action in theirs:
                message = action.message
                if message is None or not action.op.is_send or message.target != stage:
                    continue
                if message not in receives:
                    raise ScheduleError(f"worker {stage} never receives what {action} sends")
                arrivals.setdefault(peer, []).append((receives[message], message))
        last = {a.number: i for i, a in enumerate(actions) if _of_microbatch(a)}
        forwards = [i for i, action in enumerate(actions) if action.op is Op.FORWARD]
        releases = {index: microbatch for microbatch, index in last.items()}
        return cls(actions, messages, arrivals, releases, max(forwards, default=-1))


def _of_microbatch(action: Action) -> bool:
    message = action.message
    return action.op is not Op.UPDATE and (message is None or message.kind not in TIED)


class Runner:
    """Runs scripts on a stage; `senders` and `receivers` by the stage at the other end."""

    def __init__(
        self,
        stage: Stage,
        senders: Mapping[int, Sender],
        receivers: Mapping[int, Receiver],
        speed: float,
    ) -> None:
        self.doing: Action | None = None
        self._stage = stage
        self._senders = senders
        self._receivers = receivers
        self._speed = speed

    def run(
        self,
        script: Script,
        step: Step,
        on_counts: Callable[[tuple[float, ...]], None],
        scale: Callable[[], float],
    ) -> StepReport:
        """One mini-batch. Counts are told as soon as they are known; `scale` may wait."""
        self._step = step
        firsts = list(accumulate(step.samples, initial=0))
        counts: tuple[float, ...] | None = None
        spans: list[Span] = []
        self._expect(script)
        for index, (action, message) in enumerate(
            zip(script.actions, script.messages, strict=True)
        ):
            self.doing = action
            if message is not None:
                self._transfer(index, action, message)
            elif action.op is Op.UPDATE:
                scalars = {"lr": step.lr, "step": float(step.number), "grad_scale": scale()}
                start_s = time.monotonic()
                self._stage.update(scalars)
                spans.append((index, start_s, stretch(start_s, self._speed)))
            else:
                start_s = time.monotonic()
                self._pass(action, firsts[action.number])
                spans.append((index, start_s, stretch(start_s, self._speed)))
            if index in script.releases:
                self._stage.release(script.releases[index])
            if index == script.last_forward and self._stage.has_count:
                counts = self._stage.results(COUNT) or ()
                on_counts(counts)
        for sender in self._senders.values():
            spans += sender.drain()
        for receiver in self._receivers.values():
            spans += receiver.drain()
        self.doing = None
        return StepReport(self._stage.results(LOSS), counts, spans)

    def _expect(self, script: Script) -> None:
        for peer, receiver in self._receivers.items():
            kinds = [(index, self._kind(found)) for index, found in script.arrivals.get(peer, ())]
            receiver.expect([(index, kind) for index, kind in kinds if receiver.layout(kind)])

    def _pass(self, action: Action, first_sample: int) -> None:
        step, m = self._step, action.number
        if action.op is Op.FORWARD:
            rng = (step.seed, step.number, first_sample)
            self._stage.forward(m, step.samples[m], step.feeds[m], rng)
        else:
            self._stage.backward(m, step.samples[m], step.loss_tangents[m])

    def _kind(self, message: Message) -> Kind:
        tied = message.kind in TIED
        return (message.kind, 0 if tied else self._step.samples[message.number])

    def _transfer(self, index: int, action: Action, message: Message) -> None:
        kind = self._kind(message)
        if action.op.is_send:
            sender = self._senders.get(message.target)
            if sender is not None and (layout := sender.layout(kind)) is not None:
                sender.send(index, kind, self._outgoing(message, kind, layout))
        else:
            receiver = self._receivers.get(message.source)
            if receiver is not None and (layout := receiver.layout(kind)) is not None:
                self._arrived(message, layout, receiver.take(index))

    def _outgoing(self, message: Message, kind: Kind, layout: Layout) -> list[Tensor]:
        if message.kind in TIED:
            # The next update overwrites them: they leave the device before the list goes on.
            return [self._stage.get(slot.key) for slot in layout]
        return [*self._stage.depart(message.number, kind[1], layout)]

    def _arrived(self, message: Message, layout: Layout, tensors: list[Any]) -> None:
        if message.kind == TIED_GRAD:
            for slot, array in zip(layout, tensors, strict=True):
                self._stage.put(slot.key, self._stage.get(slot.key) + array)
        elif message.kind == TIED_PARAM:
            for slot, array in zip(layout, tensors, strict=True):
                self._stage.put(slot.key, array)
        else:
            self._stage.arrive(message.number, layout, tensors)
