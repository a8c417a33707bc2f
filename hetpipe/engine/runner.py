"""Walks a worker's action list: the compute thread of one part of a schedule."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.cost.emulation import stretch
from hetpipe.engine.edges import Receiver, Sender, Span
from hetpipe.engine.messages import Batch, Step, StepReport
from hetpipe.engine.stage import Stage
from hetpipe.engine.transport import Tensor
from hetpipe.engine.wiring import (
    ALL_REDUCE,
    EVALUATION,
    TIED,
    TIED_GRAD,
    TIED_PARAM,
    Kind,
    Layout,
    Place,
)
from hetpipe.schedule.action import PER_MINI_BATCH, Action, Message, Op, Schedule

Edge = tuple[Place, Place]
"""Source and target."""

Arrivals = dict[tuple[int, int], list[Message]]
"""By source and target stage: what is sent meanwhile, in the order of sending."""

Closing = frozenset[tuple[int, Op]]
"""(stage, operation)"""

_RECEIVES = {
    "F": Op.RECV_FORWARD,
    "B": Op.RECV_BACKWARD,
    TIED_GRAD: Op.RECV_TIED_GRAD,
    TIED_PARAM: Op.RECV_TIED_PARAM,
}


@dataclass(frozen=True)
class Script:
    """A part of a schedule from one worker's point of view."""

    actions: tuple[Action, ...]
    messages: tuple[Message | None, ...]  # what each action sends or receives
    arrivals: Arrivals
    closing: Closing

    @classmethod
    def of(
        cls, schedule: Schedule, worker: int, stages: Container[int], closing: Closing
    ) -> Script:
        """`stages` are those of the worker."""
        arrivals: Arrivals = {}
        for action in (action for row in schedule for action in row):
            message = action.message
            if message is not None and action.op.is_send and message.target in stages:
                arrivals.setdefault(message[:2], []).append(message)
        actions = schedule[worker]
        return cls(actions, tuple(action.message for action in actions), arrivals, closing)

    def numbered(self, first: int, microbatches: int) -> Iterable[tuple[Action, Message | None]]:
        """Actions and their messages, where mini-batch 0 of the script is `first` of the stream."""
        pairs = zip(self.actions, self.messages, strict=True)
        return (_later(a, m, first, microbatches) for a, m in pairs) if first else pairs


def _later(
    action: Action, message: Message | None, first: int, microbatches: int
) -> tuple[Action, Message | None]:
    if action.op in PER_MINI_BATCH:
        return replace(action, number=action.number + first), None
    if message is not None and message.kind in TIED:
        return action, message
    number = action.number + first * microbatches
    return replace(action, number=number), message and message._replace(number=number)


def closing(schedule: Schedule) -> Closing:
    """The last thing that each stage does with a micro-batch, which is then forgotten."""
    last: dict[int, dict[int, Op]] = {}
    for action in (action for row in schedule for action in row):
        message = action.message
        if action.op not in PER_MINI_BATCH and (message is None or message.kind not in TIED):
            last.setdefault(action.stage, {})[action.number] = action.op
    return frozenset((stage, op) for stage, ops in last.items() for op in ops.values())


class Runner:
    """Runs scripts on stages; senders and receivers by the stages at both ends."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: Mapping[int, int],
        senders: Mapping[Edge, Sender],
        receivers: Mapping[Edge, Receiver],
        speed: float,
    ) -> None:
        self.doing: Action | None = None
        self._stages = stages
        self._replicas = replicas  # which of its replicas each stage here is
        self._senders = senders
        self._receivers = receivers
        self._speed = speed
        self._batches: dict[int, Batch] = {}  # those that some stage has not applied yet
        self._firsts: dict[int, list[int]] = {}  # of each, the index of each micro-batch's first
        self._forwarded: dict[tuple[int, int], int] = {}  # (stage, mini-batch) -> forwards done
        self._clipped: dict[int, float] = {}  # the factor of the mini-batch at hand
        self._updated: Counter[int] = Counter()  # stages that have applied a mini-batch
        self._shares: dict[tuple[int, int], float] = {}  # (stage, micro-batch): of its rows
        self._versions: dict[int, int] = {}  # that each stage's last forward used

    def run(
        self,
        script: Script,
        step: Step,
        on_counts: Callable[[Batch, tuple[float, ...]], None],
        scale: Callable[[Batch], float],
        clip: Callable[[Batch, float], float],
    ) -> StepReport:
        """A part of a schedule. Counts are told as soon as they are known.

        `scale` of the gradients, and the factor that clips them for the sum of their squares here,
        may have to be waited for.
        """
        self._scale, self._clip = scale, clip
        self._microbatches, self._evaluates = step.microbatches, step.evaluates
        if step.batch is not None:
            self._batches[step.begins] = step.batch
            self._firsts[step.begins] = list(accumulate(step.batch.samples, initial=0))
        counts: tuple[float, ...] | None = None
        spans: list[Span] = []
        self._expect(script, step.first)
        for action, message in script.numbered(step.first, step.microbatches):
            self.doing = action
            start_s = time.monotonic()
            if message is not None:
                self._transfer(action, message)
            elif action.op is Op.ALL_REDUCE:
                self._all_reduce(action)
                spans.append((action, start_s, time.monotonic()))
            elif action.op is Op.UPDATE:
                batch = self._batches[action.number]
                grad_scale = self._grad_scale(action.stage, batch)
                scalars = {"lr": batch.lr, "step": float(batch.number), "grad_scale": grad_scale}
                start_s = time.monotonic()
                self._stages[action.stage].update(scalars)
                spans.append((action, start_s, stretch(start_s, self._speed)))
            else:
                self._pass(action)
                spans.append((action, start_s, stretch(start_s, self._speed)))
                if action.op is Op.FORWARD and self._stages[action.stage].has_count:
                    found = self._counted(action)
                    if found is not None:
                        counts = found
                        on_counts(self._mini_batch(action.number)[1], found)
            self._release(script, action)
        self.doing = None
        if step.drain:
            for sender in self._senders.values():
                sender.drain()
            for table in (self._updated, self._batches, self._firsts):
                table.clear()
        return self._report(spans, counts)

    def _release(self, script: Script, action: Action) -> None:
        """Forget a micro-batch when a stage is done with it, a mini-batch when all stages are."""
        if (action.stage, action.op) in script.closing:
            self._stages[action.stage].release(action.number)
        elif action.op is Op.UPDATE:
            self._updated[action.number] += 1
            if self._updated[action.number] == len(self._stages):
                for table in (self._updated, self._batches, self._firsts):
                    del table[action.number]

    def _report(self, spans: list[Span], counts: tuple[float, ...] | None) -> StepReport:
        edges: list[Sender | Receiver] = [*self._senders.values(), *self._receivers.values()]
        for edge in edges:
            spans += edge.take_spans()
        found = [self._losses(n) for n in self._stages]
        return StepReport(
            next((losses for losses in found if losses is not None), None),
            counts,
            [(a.stage, a.op.value, a.number, start_s, end_s) for a, start_s, end_s in spans],
            dict(self._versions),
            {n: stage.weights.take_most_live() for n, stage in self._stages.items()},
            {n: stage.memory.take() for n, stage in self._stages.items()},
        )

    def _losses(self, n: int) -> tuple[float, ...] | None:
        """A stage's losses since the last time; a mean counts by the replica's share of rows."""
        losses = self._stages[n].results(LOSS)
        shares = [self._shares.pop(key) for key in sorted(self._shares) if key[0] == n]
        if losses is None:
            return None
        return tuple(loss * share for loss, share in zip(losses, shares, strict=True))

    def _grad_scale(self, stage: int, batch: Batch) -> float:
        scale = self._scale(batch)
        if batch.clip is None:
            return scale
        if batch.clip.each:
            return scale * batch.clip.factor(self._stages[stage].square(scale))
        if batch.serial not in self._clipped:  # the first update: no gradient changes any more
            first = (self._stages[n] for n, replica in self._replicas.items() if replica == 0)
            square = sum(stage.square(scale) for stage in first)  # others have the same
            self._clipped = {batch.serial: self._clip(batch, square)}
        return scale * self._clipped[batch.serial]

    def _expect(self, script: Script, first: int) -> None:
        sums = [action for action in script.actions if action.op is Op.ALL_REDUCE]
        for (source, target), receiver in self._receivers.items():
            order = [(a, (ALL_REDUCE, 0)) for a in sums if source[0] == target[0] == a.stage]
            for message in script.arrivals.get((source[0], target[0]), ()):
                number = message.number
                if message.kind not in TIED:
                    number += first * self._microbatches
                    receive = Action(message.target, _RECEIVES[message.kind], number)
                else:
                    receive = Action(message.target, _RECEIVES[message.kind], message.source)
                kind = self._kind(message.kind, number)
                if receiver.layout(kind):
                    order.append((receive, kind))
            receiver.expect(order)

    def _mini_batch(self, microbatch: int) -> tuple[int, Batch, int]:
        """The mini-batch of a micro-batch: its number, itself, and the place in it."""
        number, place = divmod(microbatch, self._microbatches)
        return number, self._batches[number], place

    def _kind(self, kind: str, microbatch: int) -> Kind:
        if kind in TIED:
            return (kind, 0)
        _, batch, place = self._mini_batch(microbatch)
        return (EVALUATION if self._evaluates else kind, batch.samples[place])

    def _pass(self, action: Action) -> None:
        n, m = action.stage, action.number
        number, batch, place = self._mini_batch(m)
        lo, hi = batch.rows[n][place]
        stage, samples = self._stages[n], hi - lo
        tangent = batch.loss_tangents[place]
        share = 1.0 if stage.has_count else samples / batch.samples[place]
        tangent *= share  # a mean over fewer rows counts less
        if action.op is Op.FORWARD:
            self._shares[n, m] = share
        if self._evaluates:
            stage.evaluate(m, samples, batch.feeds[n][place])
        elif action.op is Op.FORWARD:
            rng = (batch.seed, batch.number, self._firsts[number][place] + lo)
            lag, ahead = batch.lag[n][place], batch.ahead[n][place]
            self._versions[n] = stage.weights.number - lag
            stage.forward(m, samples, batch.feeds[n][place], rng, lag, ahead)
        elif action.op is Op.BACKWARD:
            stage.backward(m, samples, tangent)
        elif action.op is Op.BACKWARD_INPUT:
            stage.backward_input(m, samples, tangent)
        else:
            stage.backward_weight(m, samples, tangent)

    def _counted(self, action: Action) -> tuple[float, ...] | None:
        """The counts of a mini-batch, when its last forward is done."""
        number, batch, _ = self._mini_batch(action.number)
        key = (action.stage, number)
        self._forwarded[key] = self._forwarded.get(key, 0) + 1
        if self._forwarded[key] < len(batch.samples):
            return None
        del self._forwarded[key]
        return self._stages[action.stage].results(COUNT) or ()

    def _all_reduce(self, action: Action) -> None:
        """Sum the gradients over the replicas, in the order of the replicas: all get the same."""
        n = action.stage
        stage, own, kind = self._stages[n], (n, self._replicas[n]), (ALL_REDUCE, 0)
        peers = {
            target: sender for (source, target), sender in self._senders.items() if source == own
        }
        peers = {target: sender for target, sender in peers.items() if target[0] == n}
        if not peers:
            return
        layout = next(iter(peers.values())).layout(kind)
        assert layout is not None
        found = {own: [stage.get(slot.key) for slot in layout]}
        for sender in peers.values():
            sender.send(action, kind, [*found[own]])
        for peer in peers:
            found[peer] = self._receivers[peer, own].take(action)
        replicas = [found[place] for place in sorted(found)]
        for slot, *arrays in zip(layout, *replicas, strict=True):
            total = arrays[0].copy()
            for array in arrays[1:]:
                total += array
            stage.put(slot.key, total)

    def _transfer(self, action: Action, message: Message) -> None:
        kind = self._kind(message.kind, message.number)
        edge = ((message.source, 0), (message.target, 0))
        if action.op.is_send:
            sender = self._senders.get(edge)
            if sender is not None and (layout := sender.layout(kind)) is not None:
                sender.send(action, kind, self._outgoing(action.stage, message, kind, layout))
        else:
            receiver = self._receivers.get(edge)
            if receiver is not None and (layout := receiver.layout(kind)) is not None:
                self._arrived(action.stage, message, layout, receiver.take(action))

    def _outgoing(self, n: int, message: Message, kind: Kind, layout: Layout) -> list[Tensor]:
        stage = self._stages[n]
        if message.kind in TIED:
            # The next update overwrites them: they leave the device before the list goes on.
            return [stage.get(slot.key) for slot in layout]
        return [*stage.depart(message.number, kind[1], layout)]

    def _arrived(self, n: int, message: Message, layout: Layout, tensors: list[Any]) -> None:
        stage = self._stages[n]
        if message.kind == TIED_GRAD:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, stage.get(slot.key) + array)
        elif message.kind == TIED_PARAM:
            for slot, array in zip(layout, tensors, strict=True):
                stage.put(slot.key, array)
        else:
            stage.arrive(message.number, layout, tensors)
