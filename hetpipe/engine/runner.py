"""Walks a worker's action list: the compute thread of one mini-batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.engine.edges import Receiver, Sender, Span
from hetpipe.engine.messages import Step, StepReport
from hetpipe.engine.stage import Stage
from hetpipe.engine.wiring import RECEIVE_OF, SEND_OF, TIED, Kind, answer_to, peer_of
from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule


@dataclass(frozen=True)
class Script:
    """A schedule from one worker's point of view."""

    actions: tuple[Action, ...]
    arrivals: dict[int, list[tuple[int, Action]]]  # per peer, in its order: (my index, its send)
    releases: dict[int, int]  # index of the last action with a micro-batch -> the micro-batch
    last_forward: int  # index; -1 if there is none

    @classmethod
    def of(cls, schedule: Schedule, stage: int) -> Script:
        """Raises `ScheduleError` if a send has no receive."""
        actions = schedule[stage]
        strange = next((action for action in actions if action.stage != stage), None)
        if strange is not None:
            raise ScheduleError(f"worker {stage} runs stage {stage} alone, but was given {strange}")
        index_of = {action: index for index, action in enumerate(actions)}
        arrivals: dict[int, list[tuple[int, Action]]] = {}
        for peer, theirs in enumerate(schedule):
            sends = [a for a in theirs if a.op in RECEIVE_OF and peer_of(a) == stage]
            for send in sends:
                if answer_to(send) not in index_of:
                    raise ScheduleError(f"{send} has no {answer_to(send)} on worker {stage}")
                arrivals.setdefault(peer, []).append((index_of[answer_to(send)], send))
        numbered = [(i, a) for i, a in enumerate(actions) if a.op not in TIED | {Op.UPDATE}]
        last = {action.number: index for index, action in numbered}
        forwards = [i for i, action in enumerate(actions) if action.op is Op.FORWARD]
        return cls(actions, arrivals, {i: m for m, i in last.items()}, max(forwards, default=-1))


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
        for index, action in enumerate(script.actions):
            self.doing = action
            if action.op is Op.FORWARD or action.op is Op.BACKWARD:
                start_s = time.monotonic()
                self._pass(action, firsts[action.number])
                spans.append((index, start_s, self._stretch(start_s)))
            elif action.op is Op.UPDATE:
                scalars = {"lr": step.lr, "step": float(step.number), "grad_scale": scale()}
                start_s = time.monotonic()
                self._stage.update(scalars)
                spans.append((index, start_s, self._stretch(start_s)))
            elif action.op in RECEIVE_OF:
                self._send(index, action)
            else:
                self._receive(index, action)
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
            kinds = [(index, self._kind(send)) for index, send in script.arrivals.get(peer, ())]
            receiver.expect([(index, kind) for index, kind in kinds if receiver.layout(kind)])

    def _pass(self, action: Action, first_sample: int) -> None:
        step, m = self._step, action.number
        if action.op is Op.FORWARD:
            rng = (step.seed, step.number, first_sample)
            self._stage.forward(m, step.samples[m], step.feeds[m], rng)
        else:
            self._stage.backward(m, step.samples[m], step.loss_tangents[m])

    def _stretch(self, start_s: float) -> float:
        """Make a compute action last as long as on the emulated, slower device; its end."""
        end_s = time.monotonic()
        if self._speed < 1.0:
            time.sleep((end_s - start_s) * (1.0 / self._speed - 1.0))
            end_s = time.monotonic()
        return end_s

    def _kind(self, send: Action) -> Kind:
        return (send.op, 0 if send.op in TIED else self._step.samples[send.number])

    def _send(self, index: int, action: Action) -> None:
        sender = self._senders.get(peer_of(action))
        kind = self._kind(action)
        layout = sender.layout(kind) if sender else None
        if sender is None or layout is None:
            return
        tensors: list[Any]
        if action.op in TIED:
            # The next update overwrites them: they leave the device before the list goes on.
            tensors = [self._stage.get(slot.key) for slot in layout]
        else:
            tensors = [*self._stage.depart(action.number, kind[1], layout)]
        sender.send(index, kind, tensors)

    def _receive(self, index: int, action: Action) -> None:
        op = SEND_OF[action.op]
        kind = (op, 0 if op in TIED else self._step.samples[action.number])
        receiver = self._receivers.get(peer_of(action))
        layout = receiver.layout(kind) if receiver else None
        if receiver is None or layout is None:
            return
        tensors = receiver.take(index)
        if op is Op.SEND_TIED_GRAD:
            for slot, array in zip(layout, tensors, strict=True):
                self._stage.put(slot.key, self._stage.get(slot.key) + array)
        elif op is Op.SEND_TIED_PARAM:
            for slot, array in zip(layout, tensors, strict=True):
                self._stage.put(slot.key, array)
        else:
            self._stage.arrive(action.number, layout, tensors)
