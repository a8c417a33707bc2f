"""Sums over replicas that go on while their worker computes: a thread of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hetpipe.wire.edges import OnError
from hetpipe.wire.transport import EdgeClosedError


class Sums:
    """Does sums one after the other, in the order in which they are begun."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "sums")  # starts with the first sum
        self._begun: list[Future[None]] = []

    def begin(self, add: Callable[[], None]) -> None:
        """Do a sum beside what the caller does next."""
        self._begun.append(self._thread.submit(self._guarded, add))

    def wait(self) -> None:
        """Wait until all that have begun are done. Raises what one of them raised."""
        for each in self._begun:
            each.result()
        self._begun.clear()

    def close(self) -> None:
        """End the thread; what has not begun does not any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _guarded(self, add: Callable[[], None]) -> None:
        try:
            add()
        except EdgeClosedError:
            raise
        except Exception as error:
            self._on_error(error)  # at once: the others wait for what only the controller can end
            raise
