"""Collects the replies, the present actions and the first failure of the workers (stations 13 and
15 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol

from hetpipe.crew.severed import Break, Breaks, culprit
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.wire.copy_messages import Copied, Stored
from hetpipe.wire.ends import Severed
from hetpipe.wire.messages import Beat, Failure, Losses, News, Norm, Reply
from hetpipe.worker.lanes import WAITS

logger = logging.getLogger("hetpipe")

TICK_S = 1.0
PAUSE_TICKS = 3
"""If one turn of a loop takes more ticks, this process was stopped, and so were all workers."""
NOTICE_S = 60.0
"""Seconds without progress until a notice says what every worker does; the next notice takes ten
times as long."""

_PASS = re.compile(r"(\d+)([FBIWU])\d*")  # an action that computes, and does not wait
_PASSES = {
    "F": "the forward", "B": "the backward", "I": "the input half of the backward",
    "W": "the weight half of the backward", "U": "the update",
}  # fmt: skip


class Patience:
    """The time after which workers that do not move count as stuck; longer after longer steps.

    The limit applies while every worker waits for another worker. A pass may take any time.
    """

    FIRST_STEP_S = 600.0
    LEAST_S = 60.0
    STEPS = 20  # times the longest step so far

    def __init__(self) -> None:
        self.limit_s = self.FIRST_STEP_S
        self._longest_s = 0.0

    def add(self, step_s: float) -> None:
        """Record the duration of a step."""
        self._longest_s = max(self._longest_s, step_s)
        self.limit_s = max(self.LEAST_S, self.STEPS * self._longest_s)


class RemoteTraceError(Exception):
    """Carries a worker's traceback as the cause of a `WorkerError`."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


class Reports(Protocol):
    """The place where a fleet reports on its workers, which it numbers from 0."""

    on_failure: Callable[[], None]
    relays: bool
    """Whether messages are only passed on, packed as they came."""

    @property
    def failed(self) -> bool: ...

    @property
    def owns(self) -> bool: ...

    def label(self, worker: int) -> str: ...

    def doing_of(self, worker: int) -> str: ...

    def arrived(self, worker: int, message: Any) -> None: ...

    def fail(self, text: str, trace: str = "", lost: Collection[int] = ()) -> None: ...

    def check(self) -> None: ...

    def await_failure(self, worker: int, limit_s: float) -> None: ...


class Control:
    """Collects the workers' messages, on any thread; `gather` waits for replies.

    `labels` name the workers in messages to the user. `check` and `gather` raise the first failure.
    `doing[n]` returns worker n's present action. `on_failure` runs once, on the thread that reports
    the failure. `on_copied` gets the pieces of copies, on the thread that receives them.
    """

    relays = False

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self.on_failure: Callable[[], None] = lambda: None
        self.on_copied: Callable[[Copied | Stored], None] = lambda piece: None
        self.lost: frozenset[int] = frozenset()
        """The workers whose loss is the failure; none if the failure has another cause."""
        self.hosts_answer: Callable[[Collection[str]], bool] = lambda hosts: True
        """Waits for an answer of these hosts; False if one of them is lost."""
        self.places: Sequence[str] = [""] * len(self.labels)
        """The host of each worker, and `own_host`, the controller's."""
        self.own_host = ""
        self.quiet = False
        """Whether the caller tells the user about a failure."""
        self.raised = False
        """Whether an error in a worker is the failure, and the worker has not just ended."""
        self._beats = ["start"] * len(self.labels)
        self._replies: list[list[Any]] = [[] for _ in self.labels]
        self._news: list[News] = []
        # Held while replies, news, beats or the error change; never while a message is sent, nor
        # while `on_news` or `on_failure` runs, since they take other locks.
        self._changed = threading.Condition()
        self._error: tuple[str, str] | None = None
        self._breaks = Breaks(self._blame)
        self._owner = os.getpid()
        self._notice_s = NOTICE_S
        self._gathering = False  # whether the user's thread waits
        self.doing: list[Callable[[], str]] = [
            partial(self._beats.__getitem__, i) for i in range(len(self.labels))
        ]

    @property
    def failed(self) -> bool:
        return self._error is not None

    @property
    def owns(self) -> bool:
        """Whether this process started the workers; False in a fork of that process."""
        return os.getpid() == self._owner

    def arrived(self, worker: int, message: Any) -> None:
        if isinstance(message, Failure):
            where = f" at {message.doing}" if message.doing != "idle" else ""
            text = f"{self.labels[worker]} failed{where}: {message.summary}"
            self.fail(text, message.trace, [worker])
            return
        if isinstance(message, Severed):
            self._breaks.add(worker, message)
            return
        if isinstance(message, (Copied, Stored)):
            self.on_copied(message)
            return
        with self._changed:
            if isinstance(message, Beat):
                self._beats[worker] = message.doing
                return
            if isinstance(message, Reply):
                self._replies[worker].append(message.value)
            elif isinstance(message, (Losses, Norm)):
                self._news.append(message)
            self._changed.notify_all()

    def fail(self, text: str, trace: str = "", lost: Collection[int] = ()) -> None:
        """End the run, and tell the user at once if nobody waits for the workers.

        `lost` are the workers whose loss is the reason. The present work of the user's thread, such
        as the capture of a model, may take minutes.
        """
        told = self._gathering
        if self.end(text, trace, lost) and not (told or self.quiet):
            logger.warning("%s", text)

    def end(self, text: str, trace: str = "", lost: Collection[int] = ()) -> bool:
        """End the run and return whether it had not failed before: later failures only follow from
        the first."""
        with self._changed:
            if self._error is not None:
                return False
            self._error = (text, trace)
            self.lost, self.raised = frozenset(lost), bool(trace)
            self._changed.notify_all()
        self._breaks.cancel()
        self.on_failure()
        return True

    def _blame(self, breaks: Sequence[Break]) -> None:
        """End the run because of broken wires, unless one of their hosts is found lost.

        On busy machines a host may be found lost only now, and another one must not go for it.
        """
        ends = {worker for each in breaks for worker in (each.worker, each.neighbour)}
        if not self.hosts_answer({self.places[worker] for worker in ends}):
            return
        one, other, reason = breaks[0]
        why = f": {reason}" if reason else ""
        self.fail(
            f"the connection between {self.labels[one]} and {self.labels[other]} is lost, and both "
            f"still live{why}",
            lost=culprit(breaks, self.places, self.own_host),
        )

    def check(self) -> None:
        """Raise `WorkerError` if the run has failed, `HetpipeError` in a fork of the process."""
        if not self.owns:
            raise HetpipeError(
                f"process {os.getpid()} is a fork of process {self._owner}, which started these "
                "workers: they answer only that process; start other workers here"
            )
        if self._error is not None:
            text, trace = self._error
            raise WorkerError(text) from (RemoteTraceError(trace) if trace else None)

    def gather(
        self,
        workers: Sequence[int],
        patience_s: float | None = None,
        on_news: Callable[[News], None] | None = None,
        pass_limit_s: float | None = None,
    ) -> list[Any]:
        """Wait for one reply from each of these workers.

        News that arrive before the last reply go to `on_news`; without `on_news`, news are kept.
        Raises `WorkerError` if a worker fails, or if no worker moves for `patience_s` or, while a
        worker is in a pass, for `pass_limit_s`. Time in which this process was stopped does not
        count.
        """
        self._gathering = True
        try:
            return self._gather(workers, patience_s, on_news, pass_limit_s)
        finally:
            self._gathering = False

    def _gather(
        self,
        workers: Sequence[int],
        patience_s: float | None,
        on_news: Callable[[News], None] | None,
        pass_limit_s: float | None,
    ) -> list[Any]:
        moved_s, positions = time.monotonic(), self._positions(workers)
        while True:
            begin_s = time.monotonic()
            with self._changed:
                if not self._ready(workers, on_news is not None):
                    self._changed.wait(TICK_S)
                self.check()
                news: list[News] = []
                if on_news is not None:
                    news, self._news = self._news, []
                replies = None
                if all(self._replies[worker] for worker in workers):
                    replies = [self._replies[worker].pop(0) for worker in workers]
            for item in news:  # news after the last reply belong to the next mini-batch
                assert on_news is not None
                on_news(item)
            if replies is not None:
                return replies
            before, positions = positions, self._positions(workers)
            now_s = time.monotonic()
            if positions != before or now_s - begin_s > PAUSE_TICKS * TICK_S:
                moved_s = now_s
            in_pass = any(_passes(doing) for doing, _ in positions)  # a device computes
            limit_s = pass_limit_s if in_pass else patience_s
            silent_s = now_s - moved_s
            if limit_s is not None and silent_s > limit_s:
                stuck = [worker for worker in workers if _may_be_stuck(self.doing[worker]())]
                self.fail(
                    f"nothing has moved for {limit_s:.0f} s, so all workers are ended: "
                    f"{self.describe(workers)}",
                    lost=stuck,
                )
            elif silent_s > self._notice_s:
                self._notice_s = 10 * silent_s
                ends = "; a pass may take any time, unless pass_limit_s limits it"
                logger.warning(
                    f"nothing has moved for {silent_s:.0f} s: {self.describe(workers)}"
                    f"{ends if in_pass and limit_s is None else ''}"
                )

    def has_replies(self, count: int) -> bool:
        """Return whether each worker has `count` replies to gather."""
        with self._changed:
            return all(len(replies) >= count for replies in self._replies)

    def await_failure(self, worker: int, limit_s: float) -> None:
        """Wait until the watcher reports why a worker is gone, and raise that."""
        self.gather([worker], patience_s=limit_s)

    def label(self, worker: int) -> str:
        return self.labels[worker]

    def doing_of(self, worker: int) -> str:
        return self.doing[worker]()

    def describe(self, workers: Sequence[int]) -> str:
        """Return the present action of each of these workers, in words."""
        return ", ".join(
            f"{self.labels[worker]} {_words(self.doing[worker]())}" for worker in workers
        )

    def _ready(self, workers: Sequence[int], news: bool) -> bool:
        replied = all(self._replies[worker] for worker in workers)
        return replied or (news and bool(self._news)) or self._error is not None

    def _positions(self, workers: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.doing[worker](), len(self._replies[worker])) for worker in workers]


def _passes(doing: str) -> list[re.Match[str]]:
    """Return the present passes, one for each lane that is in a pass."""
    return [match for lane in doing.split(" and ") if (match := _PASS.fullmatch(lane))]


def _may_be_stuck(doing: str) -> bool:
    """Return whether a worker's device, and not a missing message, may keep it from moving."""
    return doing in ("start", "copy") or bool(_passes(doing))


def _words(doing: str) -> str:
    if doing == "idle":
        return "is idle"
    receives = ("RF", "RB", "RG", "RP", "RK", "RV")
    lanes = doing.split(" and ")
    if all(lane.endswith(WAITS) or any(op in lane for op in receives) for lane in lanes):
        return f"waits in {doing.replace(WAITS, '')}"
    passes = [f"{_PASSES[match[2]]} of stage {match[1]}" for match in _passes(doing)]
    return f"is at {doing}" + (f" ({', '.join(passes)})" if passes else "")
