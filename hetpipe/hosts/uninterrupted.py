"""Calls that an interrupt (Ctrl-C, a notebook's stop button) cannot leave half done."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Callable


class Holder:
    """An object whose method handles signals when the present call has ended."""


def is_held(handler: object) -> bool:
    """Whether a handler of signals is a method of a `Holder`."""
    return isinstance(getattr(handler, "__self__", None), Holder)


def call_uninterrupted(function: Callable[[], None]) -> None:
    """Call a function. A signal's handler may raise an error before the call or after it.

    Python runs the handlers of signals on the main thread, between any two operations. So there
    another thread makes the call. It takes longer than a short message, so it is not used while a
    `Holder` handles interrupts. A second interrupt ends the wait for the call, but not the call.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or is_held(signal.getsignal(signal.SIGINT)):
        function()
        return
    # Taken once and never released: by the thread, or by the caller to prevent the call.
    begun = threading.Lock()
    # Held until the call has ended.
    ended = threading.Lock()
    ended.acquire()
    errors: list[BaseException] = []

    def run() -> None:
        if begun.acquire(blocking=False):
            try:
                function()
            except BaseException as error:
                errors.append(error)
            ended.release()

    def wait() -> None:
        with ended:
            pass

    try:
        _thread.start_new_thread(run, ())  # an interrupt may break the locks of a `Thread`
        wait()
    except BaseException as error:
        if not begun.acquire(blocking=False):
            wait()
        elif isinstance(error, RuntimeError):  # no thread can start, as at the end of Python
            function()
            return
        raise
    if errors:
        raise errors.pop()
