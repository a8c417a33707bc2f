"""Lanes: streams of a card with callbacks, and the events of their work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from queue import SimpleQueue
from typing import Any

import torch

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Event

_POLL_S = (50e-6, 1e-3)  # first and longest pause in a wait with a timeout


def _blocking(module: Any) -> dict[str, bool]:
    """Return the arguments for events whose waits sleep: a CPU stage needs the spinning core."""
    return {"blocking": True} if "blocking" in signature(module.Event.__new__).parameters else {}


class Lane:
    """A stream, and a thread that calls back when work on the stream has ended; no schedule's lane.

    torch has no callbacks on streams, so the thread waits. It starts for the first callback.
    """

    def __init__(self, module: Any, device: torch.device, name: str) -> None:
        self.stream = module.Stream(device=device)
        self.name = name
        self._event = partial(module.Event, **_blocking(module))
        self._device = device
        self._asked: SimpleQueue[tuple[Any, Callable[[], None]] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def mark(self) -> Any:
        """Return torch's event for the end of all work on the stream so far."""
        native = self._event()
        native.record(self.stream)
        return native

    def order(self, after: Sequence[Event]) -> None:
        """Let later work wait for `after`: on the device if possible, else on the host."""
        for event in after:
            if isinstance(event, StreamEvent) and event.lane.kind == self.kind:
                self.stream.wait_event(event.native)
            else:
                event.wait()

    @property
    def kind(self) -> str:
        """torch's name for the type of the device, such as `cuda`."""
        return self._device.type

    def when_ended(self, native: Any, fn: Callable[[], None]) -> None:
        """Call `fn` on the lane's thread once `native` has ended, even if it failed."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=self.name, daemon=True)
                self._thread.start()
        self._asked.put((native, fn))

    def _watch(self) -> None:
        while (asked := self._asked.get()) is not None:
            native, fn = asked
            # The error is not lost: the event raises it for everyone who waits.
            with contextlib.suppress(RuntimeError):
                native.synchronize()
            fn()

    def close(self) -> None:
        """Let the thread end after its pending callbacks."""
        self._asked.put(None)


class StreamEvent(Event):
    """The end of work on a lane; `check` raises if the work went wrong, and is called after it."""

    def __init__(
        self, device_id: str, lane: Lane, check: Callable[[], None] = lambda: None
    ) -> None:
        self.lane = lane
        self.native = lane.mark()
        self._device_id = device_id
        self._check = check

    def done(self) -> bool:
        ended = bool(self._ask(self.native.query))
        if ended:
            self._check()
        return ended

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None:
            self._ask(self.native.synchronize)
            self._check()
            return
        end_s, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
        while not self.done():
            if time.monotonic() > end_s:
                raise BackendError(f"{self._device_id}: not done after {timeout_s} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except RuntimeError as error:
            raise BackendError(f"{self._device_id}: {error}") from error
