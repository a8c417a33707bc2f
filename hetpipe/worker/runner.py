"""Walks a worker's script, or one script per lane (stations 5, 13 and 15 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest

from hetpipe.capture.program import COUNT, LOSS
from hetpipe.schedule.action import (
    AFTER_SUMS,
    GRADIENTS,
    PEERS,
    TIED,
    Action,
    Message,
    Op,
    Schedule,
)
from hetpipe.schedule.complete import Closing
from hetpipe.schedule.lanes import HAND_OVERS
from hetpipe.wire.edges import OnError, Span
from hetpipe.wire.messages import Array, Batch, Losses, Step, StepReport
from hetpipe.wire.shares import Replica, Shares
from hetpipe.wire.wire import GRADIENTS as ALL_GRADIENTS
from hetpipe.wire.wire import Content, Kind, Leaving
from hetpipe.worker.emulation import Emulation, Moment
from hetpipe.worker.exchange import Exchange, Expected
from hetpipe.worker.lanes import HandOver, Sums, walk
from hetpipe.worker.stage import Pass, Stage
from hetpipe.worker.updates import MiniBatches, Updates

ScriptStep = tuple[Action, Message | None]
"""An action, and the message that it sends or receives."""


@dataclass(frozen=True)
class Script:
    """The steps of one worker or lane in a part, numbered from the part's first mini-batch."""

    steps: tuple[ScriptStep, ...]
    arrivals: tuple[Message, ...]
    """The messages that arrive at the worker during the part, each sender's messages in order."""
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
        return tuple(action for action, _ in self.steps)

    def numbered(self, first: int, microbatches: int) -> Iterable[ScriptStep]:
        """Return the steps, numbered so that the script's mini-batch 0 is the stream's `first`."""
        if not first:
            return self.steps
        later = (action.later(first, microbatches) for action, _ in self.steps)
        return ((action, action.message) for action in later)


_RECEIVES = {
    "F": Op.RECV_FORWARD,
    "B": Op.RECV_BACKWARD,
    "G": Op.RECV_TIED_GRAD,
    "P": Op.RECV_TIED_PARAM,
}


LateFeeds = Mapping[int, Sequence[Mapping[str, Array]]]
"""The leaves that backwards read and forwards do not, by stage and micro-batch."""


class Runner:
    """Runs scripts on a worker's stages, and calls `tell` with the losses of each mini-batch.

    `late_feeds` waits for the leaves of backwards that need the loss of the whole mini-batch.
    Each pass is stretched to its duration at the emulated speed.
    """

    def __init__(
        self,
        exchange: Exchange,
        updates: Updates,
        tell: Callable[[Losses], None],
        late_feeds: Callable[[Batch], LateFeeds],
        emulation: Emulation,
        on_error: OnError,
    ) -> None:
        self.hand_over = HandOver()
        self.sums = Sums(on_error)
        self._exchange, self._updates, self._tell = exchange, updates, tell
        self._stages: Mapping[int, Stage] = updates.stages
        self._own = {n: Replica(n, number) for n, number in updates.replicas.items()}
        self._shares: Shares = updates.shares
        self._mini_batches: MiniBatches = updates.mini_batches
        self._late_feeds, self._emulation = late_feeds, emulation
        self._on_error = on_error
        self._doing: dict[int, Action] = {}  # by lane
        self._parts: dict[tuple[int, int], float] = {}  # (stage, micro-batch): share of rows
        self._versions: dict[int, int] = {}  # version of each stage's last forward

    @property
    def doing(self) -> str:
        """The present action of each lane that has one."""
        return " and ".join(map(self._exchange.waits.text, self._doing.copy().values()))

    def run(self, lanes: Sequence[Script], step: Step) -> StepReport:
        """Run a part of a schedule, all lanes at once."""
        self._versions.clear()
        self._forwards, self._keeps_output = step.forwards, step.keeps_output
        self._mini_batches.begin(step)
        self._counts: tuple[float, ...] | None = None
        self._spans: list[Span] = []
        self._expect(lanes, step.first)
        walks = [partial(self._walk, lane, script, step) for lane, script in enumerate(lanes)]
        walk(walks, self.hand_over, self._on_error)
        self.sums.wait()
        if step.drain:
            self._exchange.drain()
            self._mini_batches.clear()
        return self._report(lanes)

    def _walk(self, lane: int, script: Script, step: Step) -> None:
        """Run one lane; its passes go to the device's queue that has the lane's number."""
        steps = [*script.numbered(step.first, step.microbatches)]
        for (action, message), following in zip_longest(steps, steps[1:]):
            self._doing[lane] = action
            if action.op in AFTER_SUMS:
                with self._exchange.waits.at(action.stage):
                    self.sums.wait()
            if action.op in GRADIENTS:
                self._exchange.pass_gradients(action)
            elif message is not None and action.op in HAND_OVERS:
                (self.hand_over.give if action.op.is_send else self.hand_over.take)(message)
            elif message is not None:
                self._transfer(action, message)
            elif action.op is Op.ALL_REDUCE:
                waits = following is None or following[0].op in AFTER_SUMS
                self._sum(action, beside=not waits)
            elif action.op is Op.LOSS:
                self._await_loss(action)
            elif action.op is Op.UPDATE:
                begin = self._updates.apply(action)
                self._spans.append((action, begin.clock_s, self._emulation.stretch(begin)))
                self._mini_batches.applied(self._updates.round(action), len(self._stages))
                self._stages[action.stage].loans.give_back(action.number)
            else:
                self._pass(action, lane, following)
            if (action.stage, action.op) in script.closing:
                self._stages[action.stage].release(action.number)
        self._doing.pop(lane, None)  # a lane with an empty row had no action

    def _transfer(self, action: Action, message: Message) -> None:
        """Send or receive a message. Between flushes, a tied parameter that travels is the version
        for the passes of one mini-batch."""
        n, mini_batch = action.stage, self._mini_batch(message)
        stage, batch = self._stages[n], None
        if stage.loans.streams and message.kind == Content.TIED_PARAM:
            batch = self._mini_batches.update(mini_batch)  # at a flush, this is no mini-batch
        if isinstance(batch, Batch) and action.op.is_send:
            first = mini_batch * self._mini_batches.microbatches
            stage.loans.choose(mini_batch, first, batch.lag[n][0], batch.ahead[n][0])
        self._exchange.transfer(action, message, self._kind(message), mini_batch)
        if isinstance(batch, Batch) and action.op.is_receive:
            stage.loans.borrow(mini_batch)

    def _mini_batch(self, message: Message) -> int:
        """Return the mini-batch of a message."""
        if message.kind in TIED:
            return message.number
        return message.number // self._mini_batches.microbatches

    def _pass(self, action: Action, lane: int, following: ScriptStep | None) -> None:
        """Run a forward, or a backward or half of one."""
        n, position = action.stage, self._mini_batches.at(action.number)
        batch, place = position.batch, position.place
        lo, hi = self._shares.rows(self._own[n], position.samples)
        stage = self._stages[n]
        part = 1.0 if batch.counted else (hi - lo) / position.samples
        if action.op is Op.FORWARD:
            self._parts[n, action.number] = part
            if self._forwards is Content.FORWARD:
                self._versions[n] = stage.weights.number - batch.lag[n][place]
        work = Pass(
            action.op,
            action.number,
            samples=self._shares.count(self._own[n], position.samples),
            feed=self._feed(action, batch, place),
            rng=(batch.seed, batch.number, self._mini_batches.first_sample(position) + lo),
            lag=batch.lag[n][place],
            ahead=batch.ahead[n][place],
            loss_tangent=batch.loss_tangents[place]
            * part,  # a mean over fewer rows has less weight
            forwards=self._forwards,
            keeps_output=self._keeps_output,
            queue=lane,
            mini_batch=position.mini_batch,
        )
        leaving = self._leaving(action, following)
        begin, waited_s = Moment.now(), self._exchange.waited_s
        stage.run(work, leaving)
        waited_s = self._exchange.waited_s - waited_s  # waits for replicas are not stretched
        self._spans.append((action, begin.clock_s, self._emulation.stretch(begin.later(waited_s))))
        has_loss = self._forwards is not Content.INFERENCE and (stage.has_loss or stage.has_count)
        ends = action.op is Op.FORWARD and (has_loss or batch.awaits)
        if ends and self._mini_batches.forwarded(n, position):
            self._report_losses(stage, batch)

    def _feed(self, action: Action, batch: Batch, place: int) -> Mapping[str, Array]:
        """Return the leaves of a micro-batch that a pass uploads. It may wait for them."""
        if action.op is Op.FORWARD:
            return batch.feeds[action.stage][place]
        if batch.awaits and self._stages[action.stage].has_loss:
            return self._late_feeds(batch)[action.stage][place]
        return {}

    def _await_loss(self, action: Action) -> None:
        """Wait for the loss of the whole mini-batch, after which the last stage's backwards run."""
        begin_s, batch = time.monotonic(), self._mini_batches.update(action.number)
        assert isinstance(batch, Batch)
        self._late_feeds(batch)
        self._spans.append((action, begin_s, time.monotonic()))

    def _report_losses(self, stage: Stage, batch: Batch) -> None:
        """Report a mini-batch's counts, whether its losses are finite, or its outputs."""
        finite = counts = None
        if stage.has_loss and batch.guards:
            finite = all(map(math.isfinite, stage.results.peek(LOSS).values()))
        if stage.has_count:
            self._counts = counts = stage.results.take(COUNT) or ()
        outputs = stage.results.take_output() if batch.awaits else []
        if finite is not None or counts is not None or any(outputs):
            named = {self._own[stage.number]: outputs} if any(outputs) else {}
            self._tell(Losses(batch.serial, finite, counts, named))

    def _sum(self, action: Action, beside: bool) -> None:
        """Sum a stage's gradients over its replicas: `beside` the next actions, or before them."""
        share = self._updates.share_of_sum(action)

        def add() -> None:
            start_s = time.monotonic()
            self._exchange.all_reduce(action, share)
            self._spans.append((action, start_s, time.monotonic()))

        if beside or self.sums.begun:  # all replicas make the sums of their stages in one order
            self.sums.begin(add)
        else:
            add()

    def _leaving(self, action: Action, following: ScriptStep | None) -> Leaving | None:
        """Return a function that sends a pass's outputs while the pass runs, if the next action
        sends them. None at an emulated speed: outputs are then ready later than the device says."""
        if following is None or not self._exchange.streams or self._emulation.speed != 1.0:
            return None
        send, message = following
        same = (send.stage, send.number) == (action.stage, action.number)
        if message is None or message.kind not in "FB" or not same:
            return None
        mini_batch = self._mini_batch(message)
        return self._exchange.leaving(send, message, self._kind(message), mini_batch)

    def _kind(self, message: Message) -> Kind:
        """Return the kind of a schedule's message on the wire, for the whole micro-batch."""
        if message.kind in TIED:
            return Kind(Content(message.kind), 0)
        samples = self._mini_batches.at(message.number).samples
        forward = message.kind == Content.FORWARD
        return Kind(self._forwards if forward else Content(message.kind), samples)

    def _expect(self, lanes: Sequence[Script], first: int) -> None:
        """Tell the receivers which messages will come."""
        microbatches = self._mini_batches.microbatches
        expected: list[Expected] = []
        for action, _ in chain(*(lane.numbered(first, microbatches) for lane in lanes)):
            if action.op is Op.ALL_REDUCE:
                expected.append((action, None, ALL_GRADIENTS, action.number))
            elif action.op.is_compute and action.op is not Op.UPDATE:
                is_training = self._forwards is Content.FORWARD
                letter = action.op.value if is_training else self._forwards.value
                expected += self._exchange.within(action, letter)
        for message in lanes[0].arrivals:  # each lane lists all arrivals of the worker
            if message.kind == Content.ALL_REDUCE:
                receive = Action(message.target, Op.RECV_GRAD, message.number + first)
                expected.append((receive, message.source, ALL_GRADIENTS, receive.number))
                continue
            unit = 1 if message.kind in TIED else microbatches
            message = message._replace(number=message.number + first * unit)
            number = message.number
            if message.kind in TIED:
                number = message.source + PEERS * number
            receive = Action(message.target, _RECEIVES[message.kind], number)
            mini_batch = self._mini_batch(message)
            if self._shares.takes(self._own[message.target], mini_batch):
                expected.append((receive, message.source, self._kind(message), mini_batch))
        self._exchange.expect(expected)

    def _report(self, lanes: Sequence[Script]) -> StepReport:
        spans = self._spans + self._exchange.take_spans()
        lane_of = {(a.stage, a.op): n for n, lane in enumerate(lanes[1:], 1) for a in lane.actions}
        losses = [losses for losses in map(self._losses, self._stages) if losses is not None]
        return StepReport(
            losses[0] if losses else None,
            self._counts,
            [
                (lane_of.get((a.stage, a.op), 0), a.stage, a.op.value, a.number, start_s, end_s)
                for a, start_s, end_s in spans
            ],
            dict(self._versions),
            {n: stage.weights.take_most_live() for n, stage in self._stages.items()},
            {n: stage.memory.take() for n, stage in self._stages.items()},
            next(stage.device.memory_used_nbytes() for stage in self._stages.values()),
            self._updates.take_culprit(),
            {self._own[n]: stage.results.take_output() for n, stage in self._stages.items()},
        )

    def _losses(self, n: int) -> tuple[float, ...] | None:
        """Return a stage's losses since the last call; means are weighted by the share of rows."""
        losses = self._stages[n].results.take(LOSS)
        parts = [self._parts.pop(key) for key in sorted(self._parts) if key[0] == n]
        if losses is None:
            return None
        return tuple(loss * part for loss, part in zip(losses, parts, strict=True))
