"""What the controller knows of its workers: answers, what they are at, and the first failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hetpipe.errors import WorkerError
from hetpipe.wire.messages import Beat, Failure, Losses, News, Norm, Reply

TICK_S = 1.0


class RemoteTraceError(Exception):
    """Carries a worker's traceback as the cause of a `WorkerError`."""

    def __str__(self) -> str:
        return f"in the worker:\n{self.args[0]}"


class Control:
    """Collects what workers say, from any thread; `gather` waits for it.

    `labels` name the workers in messages to the user. After the first failure every call raises it.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = list(labels)
        self.on_failure: Callable[[], None] = lambda: None
        self._beats = ["start"] * len(self.labels)
        self._replies: list[list[Any]] = [[] for _ in self.labels]
        self._news: list[News] = []
        self._changed = threading.Condition()
        self._error: tuple[str, str] | None = None
        self.doing: list[Callable[[], str]] = [
            partial(self._beats.__getitem__, i) for i in range(len(self.labels))
        ]

    @property
    def failed(self) -> bool:
        """Whether the run is over."""
        return self._error is not None

    def arrived(self, worker: int, message: Any) -> None:
        """Take a message of a worker."""
        if isinstance(message, Failure):
            where = f" at {message.doing}" if message.doing != "idle" else ""
            self.fail(f"{self.labels[worker]} failed{where}: {message.summary}", message.trace)
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

    def fail(self, text: str, trace: str = "") -> None:
        """The first failure ends the run; later ones only follow from it."""
        with self._changed:
            if self._error is not None:
                return
            self._error = (text, trace)
            self._changed.notify_all()
        self.on_failure()

    def check(self) -> None:
        """Raises `WorkerError` if the run has failed."""
        if self._error is not None:
            text, trace = self._error
            raise WorkerError(text) from (RemoteTraceError(trace) if trace else None)

    def gather(
        self,
        workers: Sequence[int],
        patience_s: float | None = None,
        on_news: Callable[[News], None] | None = None,
    ) -> list[Any]:
        """One reply of each of these workers; news meanwhile are given to `on_news`, or kept.

        Raises `WorkerError` when one fails, or when none moves for `patience_s`.
        """
        moved_s, seen = time.monotonic(), self._positions(workers)
        while True:
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
            for found in news:  # also behind the last reply: they are of what comes next
                assert on_news is not None
                on_news(found)
            if replies is not None:
                return replies
            positions = self._positions(workers)
            if positions != seen:
                moved_s, seen = time.monotonic(), positions
            elif patience_s is not None and time.monotonic() - moved_s > patience_s:
                self.fail(
                    f"nothing has moved for {patience_s:.0f} s: {self.describe(workers)}; "
                    "all workers are ended"
                )

    def describe(self, workers: Sequence[int]) -> str:
        """Which worker is at what."""
        return ", ".join(
            f"{self.labels[worker]} {_words(self.doing[worker]())}" for worker in workers
        )

    def _ready(self, workers: Sequence[int], news: bool) -> bool:
        replied = all(self._replies[worker] for worker in workers)
        return replied or (news and bool(self._news)) or self._error is not None

    def _positions(self, workers: Sequence[int]) -> list[tuple[str, int]]:
        return [(self.doing[worker](), len(self._replies[worker])) for worker in workers]


def _words(doing: str) -> str:
    if doing == "idle":
        return "is idle"
    receives = ("RF", "RB", "RG", "RP", "RK", "RV")
    waits = all(any(op in lane for op in receives) for lane in doing.split(" and "))
    return f"waits in {doing}" if waits else f"is at {doing}"
