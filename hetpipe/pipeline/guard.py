"""One thread at a time: a pipeline's workers hold one conversation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hetpipe.errors import HetpipeError


class OneThread:
    """`with one_thread("step"):` refuses a second thread, and never waits for the first."""

    def __init__(self) -> None:
        # Held during every public call of a pipeline; calls of the same thread may be nested.
        self._lock = threading.RLock()

    @contextmanager
    def __call__(self, call: str) -> Iterator[None]:
        """Raises `HetpipeError` while another thread is in a call."""
        if not self._lock.acquire(blocking=False):
            raise HetpipeError(
                f"{call}() on thread {threading.current_thread().name!r} while another thread is "
                "in a call of this pipeline: call it from one thread at a time"
            )
        try:
            yield
        finally:
            self._lock.release()
