"""An interrupt during a message to another host leaves the connection usable."""

from __future__ import annotations

import _thread
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from types import FrameType
from typing import Any

import numpy as np
import pytest
from agents import stream_pair

from hetpipe.hosts.connection import Address, Connection
from hetpipe.hosts.uninterrupted import call_uninterrupted

LIMIT_S = 30.0
PLACE = Address(1, 0)
SMALL_NBYTES = 64 * 1024
VALUES = np.arange(1 << 21, dtype=np.uint32)  # more than the socket's buffers keep


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection, SimpleQueue[Any]]]:
    """Yield both ends of a connection, with small buffers, and the queue of what the other end
    gets. It receives once it is started."""
    ours, theirs = stream_pair()
    for stream, option in ((ours, socket.SO_SNDBUF), (theirs, socket.SO_RCVBUF)):
        stream.socket.setsockopt(socket.SOL_SOCKET, option, SMALL_NBYTES)
    arrived = SimpleQueue[Any]()
    near, far = Connection(ours, "far"), Connection(theirs, "near")
    near.start(lambda address, message: None, arrived.put)
    yield near, far, arrived
    near.close()
    far.close()


def receive(far: Connection, arrived: SimpleQueue[Any]) -> None:
    far.start(lambda address, message: arrived.put(message.unpack()), arrived.put)


class Interrupts:
    """The handler of signals. It raises `KeyboardInterrupt` while it is armed, and counts."""

    def __init__(self) -> None:
        self.armed, self.count = False, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.armed:
            self.count += 1
            raise KeyboardInterrupt


def interrupt_after(*waits_s: float, then: Callable[[], None] = lambda: None) -> threading.Thread:
    """Start a thread that interrupts the main thread after each wait, and calls a function."""

    def run() -> None:
        for wait_s in waits_s:
            time.sleep(wait_s)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        then()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    handler = Interrupts()
    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 2])
def test_a_message_leaves_whole_although_an_interrupt_comes(
    ends: tuple[Connection, Connection, SimpleQueue[Any]], interrupts: Interrupts, times: int
) -> None:
    """The other end receives only after the interrupts; a second one ends the wait."""
    near, far, arrived = ends
    interrupts.armed = True
    interrupt_after(*[0.2] * times, then=lambda: receive(far, arrived))
    with pytest.raises(KeyboardInterrupt):
        near.send(PLACE, VALUES)
    interrupts.armed = False
    assert interrupts.count == times
    near.send(PLACE, "next")
    got = [arrived.get(timeout=LIMIT_S) for _ in range(2)]
    if times > 1 and isinstance(got[0], str):  # a small message may overtake the pieces
        got.reverse()
    assert np.array_equal(got[0], VALUES), got
    assert got[1] == "next"


def test_interrupts_at_any_moment_break_nothing(
    ends: tuple[Connection, Connection, SimpleQueue[Any]], interrupts: Interrupts
) -> None:
    """Messages that arrive are whole and in order, and all that were sent undisturbed arrive."""
    near, far, arrived = ends
    receive(far, arrived)
    sent = []
    for number in range(300):
        thread = interrupt_after(1e-6 * number)
        with suppress(KeyboardInterrupt):
            interrupts.armed = True
            near.send(PLACE, (number, VALUES[:1000]))
            sent.append(number)
        interrupts.armed = False
        thread.join()
    near.send(PLACE, (-1, VALUES))
    numbers = []
    while not numbers or numbers[-1] >= 0:
        got = arrived.get(timeout=LIMIT_S)
        assert isinstance(got, tuple), got
        numbers.append(got[0])
    assert numbers[:-1] == sorted(numbers[:-1])
    assert set(sent) <= set(numbers)
    assert interrupts.count > 0


def test_a_call_happens_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function: Callable[[], None], arguments: tuple[()]) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    calls: list[int] = []
    call_uninterrupted(lambda: calls.append(1))
    assert calls == [1]


def test_the_error_of_a_call_is_raised() -> None:
    def fail() -> None:
        raise BrokenPipeError("gone")

    with pytest.raises(BrokenPipeError, match="gone"):
        call_uninterrupted(fail)
