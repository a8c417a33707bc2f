"""Events of a library's work, which hold all objects that the work uses.

Each event holds the buffers, host arrays and earlier events of its work until a call sees that the
work has ended. This module holds all pending events. So hetpipe frees no memory that work uses, and
a device that the user drops in the middle of its work lives until the work has ended.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Device, Event

from .library import Handle, Library, constant

_pending: dict[NativeEvent, None] = {}  # oldest first; each operation on this dict is atomic
_endless: list[object] = []  # objects of work without an event to wait for
_SLICE_S = 0.25  # the longest wait within a library; between two waits Ctrl-C takes effect


class NativeEvent(Event):
    """The end of some work of a library; `keeps` has the objects that the work uses."""

    def __init__(
        self, device: Device, library: Library, handle: Handle, keeps: Sequence[object]
    ) -> None:
        self.device = device
        self._library = library
        self._handle: Handle | None = handle
        self._keeps = tuple(keeps)
        self._failure: BackendError | None = None
        _pending[self] = None

    @property
    def pending(self) -> Handle | None:
        """The library's event, or None if the work has ended."""
        return self._handle

    def done(self) -> bool:
        return self._look(0.0)

    def wait(self, timeout_s: float | None = None) -> None:
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._look(max(min(end_s - time.monotonic(), _SLICE_S), 0.0)):
            if time.monotonic() >= end_s:
                raise BackendError(f"{self.device.info.id}: not done after {timeout_s} s")

    def _look(self, limit_s: float) -> bool:
        """Return whether the work ends within `limit_s`; raise its error if it failed."""
        handle = self._handle  # another thread may set it to None meanwhile
        if handle is not None:
            library, where = self._library, self.device.info.id
            try:
                if library.call(where, "wait", handle.pointer, limit_s) == constant("NOT_YET"):
                    return False
            except BackendError as error:
                self._failure = error
            self._handle, self._keeps = None, ()
            _pending.pop(self, None)
        if self._failure is not None:
            raise self._failure
        return True


def sweep() -> None:
    """Check all pending events, and release the objects of work that has ended."""
    for event in list(_pending):
        with suppress(BackendError):  # the owner of the event gets the error
            event.done()


def drain(device: Device) -> None:
    """Wait for all work of a device."""
    for event in list(_pending):
        if event.device is device:
            with suppress(BackendError):
                event.wait()


def keep_for_ever(keeps: object) -> None:
    """Never release objects whose work has no event to wait for."""
    _endless.append(keeps)
