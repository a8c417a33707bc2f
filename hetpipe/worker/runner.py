"""Walks a worker's action list, or those of its lanes: the compute threads of a schedule's part."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, zip_longest

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.schedule.action import (
    BEHIND_SUMS,
    GRADIENTS,
    PER_MINI_BATCH,
    Action,
    Message,
    Op,
    Schedule,
)
from hetpipe.schedule.closing import Closing
from hetpipe.schedule.lanes import HAND_OVERS
from hetpipe.schedule.turns import round_of
from hetpipe.wire.edges import OnError, Span
from hetpipe.wire.messages import Apply, Batch, Losses, Step, StepReport
from hetpipe.wire.pieces import Leaving
from hetpipe.wire.shares import Shares
from hetpipe.wire.wire import (
    ALL_REDUCE,
    EVALUATION,
    TIED,
    TIED_GRAD,
    TIED_PARAM,
    Kind,
)
from hetpipe.worker.emulation import stretch
from hetpipe.worker.exchange import Exchange, Expected
from hetpipe.worker.lanes import HandOver, walk
from hetpipe.worker.stage import Stage
from hetpipe.worker.sums import Sums

_RECEIVES = {
    "F": Op.RECV_FORWARD,
    "B": Op.RECV_BACKWARD,
    TIED_GRAD: Op.RECV_TIED_GRAD,
    TIED_PARAM: Op.RECV_TIED_PARAM,
}


@dataclass(frozen=True)
class Script:
    """A part of a schedule from the point of view of one worker, or of one of its lanes."""

    actions: tuple[Action, ...]
    messages: tuple[Message | None, ...]  # what each action sends or receives
    arrivals: tuple[Message, ...]  # what is sent meanwhile, in the order of every sender
    closing: Closing

    @classmethod
    def of(cls, schedule: Schedule, row: int, stages: Container[int], closing: Closing) -> Script:
        """`stages` are those of the worker."""
        sends = (a for each in schedule for a in each if a.op.is_send and a.op not in HAND_OVERS)
        sent = (action.message for action in sends)
        arrivals = tuple(m for m in sent if m is not None and m.target in stages)
        actions = schedule[row]
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


class Runner:
    """Runs scripts on stages. `replicas` says which replica of its stages this worker is."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        replicas: Mapping[int, int],
        shares: Shares,
        exchange: Exchange,
        speed: float,
        on_error: OnError,
    ) -> None:
        self.hand_over = HandOver()
        self.sums = Sums(on_error)
        self._doing: dict[int, Action] = {}  # by lane
        self._on_error = on_error
        self._stages = stages
        self._replicas = replicas
        self._shares = shares
        self._exchange = exchange
        self._speed = speed
        self._updates: dict[int, Apply] = {}  # of mini-batches that some stage has not applied yet
        self._batches: dict[int, Batch] = {}  # these mini-batches
        self._firsts: dict[int, list[int]] = {}  # of each, the index of each micro-batch's first
        self._forwarded: dict[tuple[int, int], int] = {}  # (stage, mini-batch) -> forwards done
        self._clipped: dict[int, float] = {}  # the factor of the mini-batch at hand
        self._updated: Counter[int] = Counter()  # stages that have applied a mini-batch
        self._parts: dict[tuple[int, int], float] = {}  # (stage, micro-batch): of its rows
        self._versions: dict[int, int] = {}  # that each stage's last forward used

    @property
    def doing(self) -> str:
        """The present action, of each lane that has one."""
        return " and ".join(map(str, self._doing.copy().values()))

    def run(
        self,
        lanes: Sequence[Script],
        step: Step,
        on_losses: Callable[[Losses], None],
        scale: Callable[[Apply], float],
        clip: Callable[[Apply, float], float],
    ) -> StepReport:
        """A part of a schedule, its lanes at once. Losses are told as soon as they are known.

        `scale` of the gradients, and the factor that clips them for the sum of their squares here,
        may have to be waited for.
        """
        self._on_losses, self._scale, self._clip = on_losses, scale, clip
        self._versions.clear()
        self._microbatches, self._evaluates = step.microbatches, step.evaluates
        self._updates[step.begins] = step.batch
        if isinstance(step.batch, Batch):
            self._batches[step.begins] = step.batch
            self._firsts[step.begins] = list(accumulate(step.batch.samples, initial=0))
        self._counts: tuple[float, ...] | None = None
        self._spans: list[Span] = []
        self._expect(lanes, step.first)
        walks = [partial(self._walk, lane, script, step) for lane, script in enumerate(lanes)]
        walk(walks, self.hand_over, self._on_error)
        self.sums.wait()
        if step.drain:
            self._exchange.drain()
            for table in (self._updated, self._updates, self._batches, self._firsts):
                table.clear()
        return self._report(lanes)

    def _walk(self, lane: int, script: Script, step: Step) -> None:
        """One lane of a part of a schedule; its passes go to the device's queue of that number."""
        spans = self._spans
        pairs = [*script.numbered(step.first, step.microbatches)]
        for (action, message), behind in zip_longest(pairs, pairs[1:]):
            self._doing[lane] = action
            if action.op in BEHIND_SUMS:
                self.sums.wait()
            start_s = time.monotonic()
            if action.op in GRADIENTS:
                self._exchange.pass_gradients(action)
            elif message is not None and action.op in HAND_OVERS:
                (self.hand_over.give if action.op.is_send else self.hand_over.take)(message)
            elif message is not None:
                kind = self._kind(message.kind, message.number)
                mini_batch = message.number // step.microbatches
                self._exchange.transfer(action, message, kind, mini_batch)
            elif action.op is Op.ALL_REDUCE:
                add = partial(self._sum, action, self._share_of_sum(action))
                if behind is None or behind[0].op in BEHIND_SUMS:
                    add()
                else:
                    self.sums.begin(add)
            elif action.op is Op.UPDATE:
                self._exchange.take_back(action)
                start_s = self._update(action)
                spans.append((action, start_s, stretch(start_s, self._speed)))
            else:
                waited_s = self._exchange.waited_s
                self._pass(action, lane, self._leaving(action, behind))
                waited_s = self._exchange.waited_s - waited_s  # for other replicas: no work
                spans.append((action, start_s, stretch(start_s + waited_s, self._speed)))
                if action.op is Op.FORWARD and self._stages[action.stage].has_loss:
                    self._tell_losses(action)
            self._release(script, action)
        self._doing.pop(lane, None)  # a row may be empty

    def _release(self, script: Script, action: Action) -> None:
        """Forget a micro-batch when a stage is done with it, a mini-batch when all stages are."""
        if (action.stage, action.op) in script.closing:
            self._stages[action.stage].release(action.number)
        elif action.op is Op.UPDATE:
            for number in self._round(action):
                self._updated[number] += 1
                if self._updated[number] == len(self._stages):
                    for table in (self._updated, self._updates, self._batches, self._firsts):
                        table.pop(number, None)

    def _report(self, lanes: Sequence[Script]) -> StepReport:
        spans = self._spans + self._exchange.take_spans()
        at = {(a.stage, a.op): n for n, lane in enumerate(lanes[1:], 1) for a in lane.actions}
        found = [self._losses(n) for n in self._stages]
        return StepReport(
            next((losses for losses in found if losses is not None), None),
            self._counts,
            [
                (at.get((a.stage, a.op), 0), a.stage, a.op.value, a.number, start_s, end_s)
                for a, start_s, end_s in spans
            ],
            dict(self._versions),
            {n: stage.weights.take_most_live() for n, stage in self._stages.items()},
            {n: stage.memory.take() for n, stage in self._stages.items()},
        )

    def _losses(self, n: int) -> tuple[float, ...] | None:
        """A stage's losses since the last time; a mean counts by the replica's share of rows."""
        losses = self._stages[n].results(LOSS)
        parts = [self._parts.pop(key) for key in sorted(self._parts) if key[0] == n]
        if losses is None:
            return None
        return tuple(loss * part for loss, part in zip(losses, parts, strict=True))

    def _round(self, action: Action) -> range:
        """The mini-batches of an update: several where replicas take turns."""
        together = self._shares.per_update(action.stage)
        return round_of(action.number, together, action.number + 1)

    def _sum(self, action: Action, share: float) -> None:
        """Sum a stage's gradients over its replicas, on whichever thread."""
        start_s = time.monotonic()
        self._exchange.all_reduce(action, share)
        self._spans.append((action, start_s, time.monotonic()))

    def _share_of_sum(self, action: Action) -> float:
        """What a sum over replicas multiplies this one's gradients with: they give the mean of
        mini-batches, or the sum over rows of one, which is scaled by the update."""
        if not self._shares.in_turn:
            return 1.0
        place, together = (action.stage, self._replicas[action.stage]), self._round(action)
        own = [self._updates[number] for number in together if self._shares.takes(place, number)]
        return sum(self._scale(update) for update in own) / len(together)

    def _update(self, action: Action) -> float:
        """Apply a stage's gradients, or drop them; when that began."""
        stage, update = self._stages[action.stage], self._updates[action.number]
        scale = 1.0 if self._shares.per_update(action.stage) > 1 else self._scale(update)
        factor = 1.0 if math.isnan(scale) else self._clip_factor(action.stage, update, scale)
        start_s = time.monotonic()
        if math.isnan(scale):  # a loss is not finite
            stage.undo()
        elif math.isnan(factor):
            stage.drop_gradients()
        else:
            stage.update(update.lr, scale * factor)
        return start_s

    def _clip_factor(self, stage: int, update: Apply, scale: float) -> float:
        """What the scaled gradients are multiplied with; NaN to drop them."""
        if update.clip is None:
            return 1.0
        if update.clip.each:
            return update.clip.factor(self._stages[stage].square(scale))
        if update.serial not in self._clipped:  # the first update: no gradient changes any more
            first = (self._stages[n] for n, replica in self._replicas.items() if replica == 0)
            square = sum(each.square(scale) for each in first)  # others have the same
            self._clipped = {update.serial: self._clip(update, square)}
        return self._clipped[update.serial]

    def _expect(self, lanes: Sequence[Script], first: int) -> None:
        """Tell the receivers what will come."""
        expected: list[Expected] = []
        for action, _ in chain(*(lane.numbered(first, self._microbatches) for lane in lanes)):
            if action.op is Op.ALL_REDUCE:
                expected.append((action, None, (ALL_REDUCE, 0), action.number))
            elif action.op.is_compute and action.op is not Op.UPDATE:
                letter = EVALUATION if self._evaluates else action.op.value
                expected += self._exchange.within(action, letter)
        for message in lanes[0].arrivals:  # all know what is sent to the worker
            number = message.number
            if message.kind == ALL_REDUCE:
                receive = Action(message.target, Op.RECV_GRAD, number + first)
                expected.append((receive, message.source, (ALL_REDUCE, 0), receive.number))
                continue
            if message.kind in TIED:
                receive = Action(message.target, _RECEIVES[message.kind], message.source)
            else:
                number += first * self._microbatches
                receive = Action(message.target, _RECEIVES[message.kind], number)
            mini_batch = number // self._microbatches
            own = (message.target, self._replicas[message.target])
            if self._shares.takes(own, mini_batch):
                kind = self._kind(message.kind, number)
                expected.append((receive, message.source, kind, mini_batch))
        self._exchange.expect(expected)

    def _mini_batch(self, microbatch: int) -> tuple[int, Batch, int]:
        """The mini-batch of a micro-batch: its number, itself, and the place in it."""
        number, place = divmod(microbatch, self._microbatches)
        return number, self._batches[number], place

    def _kind(self, kind: str, microbatch: int) -> Kind:
        if kind in TIED:
            return (kind, 0)
        _, batch, place = self._mini_batch(microbatch)
        return (EVALUATION if self._evaluates else kind, batch.samples[place])

    def _leaving(
        self, action: Action, behind: tuple[Action, Message | None] | None
    ) -> Leaving | None:
        """What sends a pass's outputs while it runs, if the action behind it sends them.

        Not at an emulated speed, where they are not ready when the device says so.
        """
        if behind is None or not self._exchange.streams or self._speed != 1.0:
            return None
        send, message = behind
        if message is None or message.kind not in "FB" or (send.stage, send.number) != (
            action.stage, action.number
        ):  # fmt: skip
            return None
        mini_batch = message.number // self._microbatches
        kind = self._kind(message.kind, message.number)
        return self._exchange.leaving(send, message, kind, mini_batch)

    def _pass(self, action: Action, queue: int, leaving: Leaving | None) -> None:
        n, m = action.stage, action.number
        number, batch, place = self._mini_batch(m)
        lo, hi = self._shares.rows((n, self._replicas[n]), batch.samples[place])
        stage, samples = self._stages[n], hi - lo
        tangent = batch.loss_tangents[place]
        part = 1.0 if stage.has_count else samples / batch.samples[place]
        tangent *= part  # a mean over fewer rows counts less
        if action.op is Op.FORWARD:
            self._parts[n, m] = part
        if self._evaluates:
            stage.evaluate(m, samples, batch.feeds[n][place], queue)
        elif action.op is Op.FORWARD:
            rng = (batch.seed, batch.number, self._firsts[number][place] + lo)
            lag, ahead = batch.lag[n][place], batch.ahead[n][place]
            self._versions[n] = stage.weights.number - lag
            stage.forward(m, samples, batch.feeds[n][place], rng, lag, ahead, queue, leaving)
        elif action.op is Op.BACKWARD:
            stage.backward(m, samples, tangent, queue, leaving)
        elif action.op is Op.BACKWARD_INPUT:
            stage.backward_input(m, samples, tangent, queue, leaving)
        else:
            stage.backward_weight(m, samples, tangent, queue)

    def _tell_losses(self, action: Action) -> None:
        """Tell of a mini-batch's losses after its last forward, if anybody waits for that."""
        number, batch, _ = self._mini_batch(action.number)
        stage, key = self._stages[action.stage], (action.stage, number)
        self._forwarded[key] = self._forwarded.get(key, 0) + 1
        if self._forwarded[key] < len(batch.samples):
            return
        del self._forwarded[key]
        if stage.has_count:
            self._counts = stage.results(COUNT) or ()
        elif batch.grad_scale is not None:
            return
        self._on_losses(Losses(batch.serial, stage.losses_are_finite(), self._counts))
