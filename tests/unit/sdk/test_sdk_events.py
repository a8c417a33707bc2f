"""The ready-made events: for a signal, a file descriptor, a flag, and a queue of work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import DONE, Event
from hetpipe.sdk.events import FdEvent, PolledEvent, Signal, WorkQueue


def by_signal() -> tuple[Event, Callable[[], None], Callable[[], None]]:
    """Return an event, a function that ends it, and a function that makes it fail."""
    signal = Signal("a pass on board 1")
    return signal, signal.end, lambda: signal.end(OSError("the cable is cut"))


def by_fd() -> tuple[Event, Callable[[], None], Callable[[], None]]:
    reading, writing = os.pipe()
    fails = threading.Event()

    def check() -> None:
        if fails.is_set():
            raise OSError("the cable is cut")

    def end() -> None:
        os.close(writing)  # the other end becomes readable

    def fail() -> None:
        fails.set()
        end()

    return FdEvent(reading, "a pass on board 1", check), end, fail


def by_flag() -> tuple[Event, Callable[[], None], Callable[[], None]]:
    ended, fails = threading.Event(), threading.Event()

    def poll() -> bool:
        if fails.is_set():
            raise OSError("the cable is cut")
        return ended.is_set()

    return PolledEvent(poll, "a pass on board 1"), ended.set, fails.set


KINDS = pytest.mark.parametrize("make", [by_signal, by_fd, by_flag])


@KINDS
def test_an_event_stays_done(make: Callable[[], tuple[Event, ...]]) -> None:
    event, end, _ = make()
    assert not event.done()
    with pytest.raises(BackendError, match=r"a pass on board 1: not done after 0\.01 s"):
        event.wait(0.01)
    end()
    for _ in range(2):
        assert event.done()
        event.wait(0.01)
        event.wait()


@KINDS
def test_all_waiters_wake_when_it_ends(make: Callable[[], tuple[Event, ...]]) -> None:
    event, end, _ = make()
    threads = [threading.Thread(target=event.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    end()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


@KINDS
def test_every_waiter_gets_the_error(make: Callable[[], tuple[Event, ...]]) -> None:
    event, _, fail = make()
    fail()
    for ask in (event.done, event.wait, lambda: event.wait(1), event.done):
        with pytest.raises(BackendError, match="a pass on board 1: the cable is cut"):
            ask()


def test_a_descriptor_is_closed_with_its_event() -> None:
    reading, writing = os.pipe()
    event = FdEvent(reading, "a copy")
    del event
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)
    os.close(writing)


def test_a_queue_works_in_order_and_after_given_events() -> None:
    queue, gate, done = WorkQueue("board 1"), Signal("an upload"), []
    first = queue.submit(lambda: done.append(1), [gate, DONE])
    second = queue.submit(lambda: done.append(2))
    assert not first.done()
    assert not second.done()
    gate.end()
    second.wait(20)
    assert first.done()
    assert done == [1, 2]
    queue.close()


def test_work_that_follows_a_failure_fails() -> None:
    queue, done = WorkQueue("board 1"), []

    def fail() -> None:
        raise ZeroDivisionError("no clock")

    failed = queue.submit(fail, doing="a pass on board 1")
    follower = queue.submit(lambda: done.append(1), [failed])
    other = queue.submit(lambda: done.append(2))
    for event in (failed, follower):
        with pytest.raises(BackendError, match="a pass on board 1: no clock"):
            event.wait(20)
    other.wait(20)
    assert done == [2]
    queue.close()


def test_a_queue_releases_finished_work() -> None:
    queue, gone = WorkQueue("board 1"), threading.Event()

    class Held:
        def __del__(self) -> None:
            gone.set()

    held = Held()
    queue.submit(lambda kept=held: None).wait(20)
    del held
    assert gone.wait(20)
    queue.close()
