"""Sums over replicas on an extra thread, while the worker computes (station 12 of
docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from hetpipe.wire.edges import OnError
from hetpipe.wire.transport import EdgeClosedError


class Sums:
    """Runs sums one after the other, in the order in which they begin."""

    def __init__(self, on_error: OnError) -> None:
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "sums")  # starts with the first sum
        self._begun: list[Future[None]] = []

    def begin(self, add: Callable[[], None]) -> None:
        """Begin a sum, without waiting for it."""
        self._begun.append(self._thread.submit(self._guarded, add))

    def wait(self) -> None:
        """Wait until all sums that have begun are done. Raises the error of one of them."""
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
            self._on_error(error)  # report at once: only the controller can end the waits of others
            raise
