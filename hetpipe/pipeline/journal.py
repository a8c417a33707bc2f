"""A training that records its mini-batches, so that they can be trained again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from hetpipe.crew.feeding import Hook, nothing
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.pipeline.batches import can_divide, copied
from hetpipe.pipeline.stages import Stages
from hetpipe.pipeline.training import Training
from hetpipe.wire.wire import IN_EVAL, Content

if TYPE_CHECKING:
    from hetpipe.checkpoint.checkpoint import Checkpoint
    from hetpipe.crew.request import StepResult
    from hetpipe.pipeline.results import Result
    from hetpipe.pipeline.setup import Setup
    from hetpipe.profile.measure import Progress


class Mark(Enum):
    """An event between two mini-batches."""

    FLUSH = "flush"
    APPLY = "apply"
    SNAPSHOT = "snapshot"


class MiniBatch(NamedTuple):
    """A mini-batch, as the caller gave it."""

    x: Any
    y: Any
    fails: bool = False
    """Whether its step raised an error after it had changed the training."""


def make_training(
    setup: Setup, mini_batch: int, resume: Checkpoint | None, progress: Progress
) -> Training:
    """Return a training; one that survives losses records its mini-batches."""
    kind = Recorded if setup.survival.survives else Training
    return kind(setup, mini_batch, resume, progress)


class Recorded(Training):
    """A training that keeps the mini-batches since its oldest snapshot that is still needed.

    A mini-batch is recorded once it was trained or, in a stream, handed in. A step that raises an
    error is only recorded if it changes the training.
    """

    def begin_journal(self) -> None:
        """Begin an empty journal. Nothing may be under way."""
        self._events: deque[MiniBatch | Mark] = deque()
        self._first = 0  # the number of the first event that is kept
        self._collected = 0  # mini-batches among the kept ones whose results were collected
        self._replaying = False
        self.mini_batches = 0  # recorded since the journal began
        self.journal_nbytes = 0

    @property
    def position(self) -> int:
        """The number of the next event."""
        return self._first + len(self._events)

    def mini_batches_before(self, position: int) -> int:
        """Return the number of mini-batches that were recorded before a kept position."""
        after = islice(self._events, position - self._first, None)
        return self.mini_batches - sum(isinstance(event, MiniBatch) for event in after)

    def forget(self, position: int) -> None:
        """Forget the events before a position, at which nothing was under way."""
        while self._first < position:
            event = self._events.popleft()
            self._first += 1
            if isinstance(event, MiniBatch):
                self._collected -= 1
                self.journal_nbytes -= nbytes_of(event)

    @property
    def sizes(self) -> set[int]:
        """The sizes of micro-batches that are trained."""
        return self.stages.sizes[Content.FORWARD]

    def renew(self, setup: Setup, values: Checkpoint, steps: int, updates: Sequence[int]) -> None:
        """Continue with another crew and plan from these values; nothing is under way then."""
        sizes, plan = self.stages.sizes, setup.plan
        for content in IN_EVAL:  # other sizes are chosen under more replicas, see `forward_sizes`
            sizes[content] = {size for size in sizes[content] if can_divide(size, plan)}
        self.setup, self._crew = setup, setup.crew
        self.stages = Stages(setup, self._progress, self._clip)
        self.stages.sizes = sizes
        self._handed_out.clear()
        self._accumulated.clear()
        self.steps, self.updates = steps, list(updates)
        self.stages.load(values, self.updates, steps)

    def step(self, x: Any, y: Any, fed: int = 0, beside: Hook = nothing) -> Result:
        kept, steps, ran = self._kept(x, y), self.steps, self.ran
        try:
            result = super().step(x, y, fed, beside)
        except WorkerError:
            raise
        except HetpipeError:
            drops = self.setup.updates.accumulate > 1 and self.ran is not ran
            if self.steps > steps or drops:
                self._record_event(kept._replace(fails=True), collects=True)
            raise
        self._record_event(kept, collects=True)
        return result

    def admit(self, x: Any, y: Any) -> None:
        kept = self._kept(x, y)
        super().admit(x, y)
        self._record_event(kept, collects=False)

    def _kept(self, x: Any, y: Any) -> MiniBatch:
        """Return a mini-batch to record: a copy, since the caller may use its tensors again.

        It is made before the training, so that no mini-batch is trained and not recorded.
        """
        return MiniBatch(x, y) if self._replaying else MiniBatch(copied(x), copied(y))

    def collect(self) -> Result:
        with self._recorded(None, collects=True):
            return super().collect()

    def flush(self) -> None:
        streaming = self.stages.streaming
        is_event = streaming is not None and streaming.admitted > 0
        with self._recorded(Mark.FLUSH if is_event else None):
            super().flush()

    def apply(self) -> StepResult | None:
        with self._recorded(Mark.APPLY if self.accumulated else None):
            return super().apply()

    @contextmanager
    def _recorded(self, event: Mark | None, collects: bool = False) -> Iterator[None]:
        """Record an event unless the block raises `WorkerError`. Other errors will come again."""
        try:
            yield
        except WorkerError:
            raise
        except HetpipeError:
            self._record_event(event, collects)
            raise
        else:
            self._record_event(event, collects)

    def _record_event(self, event: MiniBatch | Mark | None, collects: bool) -> None:
        if self._replaying:
            return
        self._collected += collects
        if isinstance(event, MiniBatch):
            self.mini_batches += 1
            self.journal_nbytes += nbytes_of(event)
        if event is not None:
            self._events.append(event)

    def record_snapshot(self) -> None:
        """Record that a snapshot was begun."""
        self._events.append(Mark.SNAPSHOT)

    def replay(self, snapshot: Callable[[int], None]) -> int:
        """Train the recorded mini-batches again; drop the results that were collected before.

        The training must be as it was at the first event. `snapshot` begins a snapshot with the
        position of its event. Return the number of mini-batches. Raises `HetpipeError` if a mini-
        batch can be trained now and could not be before, or the other way round.
        """
        self._replaying, watch, history = True, self.watch, list(self.results.history)
        self.watch = lambda result, samples: None
        left, count = self._collected, 0
        try:
            for position, event in enumerate(self._events, self._first):
                if event is Mark.SNAPSHOT and position > self._first:
                    snapshot(position)
                elif event is Mark.APPLY:
                    self._again(self.apply)
                elif event is Mark.FLUSH:
                    left -= self._collect(self.under_way)
                    self._again(self.flush)
                elif isinstance(event, MiniBatch):
                    count += 1
                    left -= self._train_again(event, left)
            self._collect(left)
        finally:
            self._replaying, self.watch = False, watch
            self.results.history.clear()
            self.results.history.extend(history)
        return count

    def _train_again(self, event: MiniBatch, left: int) -> int:
        """Train a mini-batch, and return how many results were collected."""
        if not self.streams:
            self._step_again(event)
            return 1
        self.admit(event.x, event.y)
        return self._collect(1) if self.is_full and left > 0 else 0

    def _step_again(self, event: MiniBatch) -> None:
        number, now = self.steps, "does not fail now"
        try:
            self.step(event.x, event.y)
            fails = False
        except WorkerError:
            raise
        except HetpipeError as error:
            fails, now = True, f"fails now: {error}"
        if fails != event.fails:
            before = "failed" if event.fails else "was trained"
            raise HetpipeError(
                f"the training cannot be repeated after a loss: mini-batch {number} {before} "
                f"before the loss, and {now}; continue from a checkpoint"
            )

    def _collect(self, count: int) -> int:
        for _ in range(count):
            self._again(self.collect)
        return count

    @staticmethod
    def _again(call: Any) -> None:
        """Make a call again. Its error, unless a worker is lost, was raised before."""
        try:
            call()
        except WorkerError:
            raise
        except HetpipeError:
            pass


def nbytes_of(event: MiniBatch) -> int:
    """Return the size of a mini-batch's tensors in bytes."""
    from torch.utils._pytree import tree_leaves

    return sum(getattr(leaf, "nbytes", 0) for leaf in tree_leaves((event.x, event.y)))
