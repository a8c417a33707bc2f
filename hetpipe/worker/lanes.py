"""Walks the lanes of a worker at the same time, and runs sums over replicas beside them (station 12
of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from hetpipe.schedule.action import Action, Message
from hetpipe.wire.edges import OnError
from hetpipe.wire.transport import EdgeClosedError


class HandOver:
    """Hands micro-batches from one lane of a worker to another (messages K and V of a schedule).

    The messages carry no tensors, because both lanes share the stage, which has the tensors.
    """

    def __init__(self) -> None:
        self._handed_over: set[Message] = set()
        self._changed = threading.Condition()
        self._closed = False

    def give(self, message: Message) -> None:
        with self._changed:
            self._handed_over.add(message)
            self._changed.notify_all()

    def take(self, message: Message) -> None:
        """Wait for a message from another lane. Raises `EdgeClosedError` when closed."""
        with self._changed:
            while message not in self._handed_over:
                if self._closed:
                    raise EdgeClosedError
                self._changed.wait()
            self._handed_over.remove(message)

    def close(self) -> None:
        """Wake the lanes that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def walk(lanes: Sequence[Callable[[], None]], hand_over: HandOver, on_error: OnError) -> None:
    """Walk all lanes to their ends, the first lane on this thread; raise the first error.

    An error is reported at once, since only the controller can end waits for other workers.
    """
    errors: list[BaseException] = []

    def guarded(lane: Callable[[], None]) -> None:
        try:
            lane()
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, EdgeClosedError):
                on_error(error)
            hand_over.close()

    threads = [threading.Thread(target=guarded, args=(lane,), daemon=True) for lane in lanes[1:]]
    for thread in threads:
        thread.start()
    guarded(lanes[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


WAITS = " waits"
"""Follows the name of an action within which a worker waits."""


class Waits:
    """The stages at which a worker waits for other workers or the controller within an action."""

    def __init__(self) -> None:
        self._stages: list[int] = []

    @contextmanager
    def at(self, stage: int) -> Iterator[None]:
        """Surround a wait."""
        self._stages.append(stage)
        try:
            yield
        finally:
            self._stages.remove(stage)

    def text(self, action: Action) -> str:
        """Return the name of a present action, and whether it waits."""
        return f"{action}{WAITS}" if action.stage in self._stages else str(action)


class Sums:
    """Runs sums on a separate thread, one after another, in the order of the calls of `begin`."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "sums")  # starts with the first sum
        self._begun: list[Future[None]] = []

    def begin(self, add: Callable[[], None]) -> None:
        """Begin a sum, without waiting for it."""
        self._begun.append(self._thread.submit(self._guarded, add))

    @property
    def begun(self) -> bool:
        """Whether a sum has begun since the last wait."""
        return bool(self._begun)

    def wait(self) -> None:
        """Wait until all sums that have begun are done. Raises the error of a sum that failed."""
        for begun in self._begun:
            begun.result()
        self._begun.clear()

    def close(self) -> None:
        """End the thread; sums that have not begun are dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guarded(self, add: Callable[[], None]) -> None:
        try:
            add()
        except EdgeClosedError:
            raise
        except Exception as error:
            self._on_error(error)  # report at once: only the controller can end waits for workers
            raise
