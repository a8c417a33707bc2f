"""Copies of a worker's values that a thread sends while the worker continues."""

from __future__ import annotations

import errno
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hetpipe.wire.copy_messages import Copied, Copy
from hetpipe.worker.copying import Copying

KEY: Any = ("param", "w")
NBYTES = 64


class Worker:
    """A worker with one value, and a channel that is open or not."""

    def __init__(self) -> None:
        self.value = np.zeros(NBYTES, np.uint8)
        self.open = threading.Event()
        self.sent = list[Copied]()
        self.failures = list[BaseException]()
        self.copying = Copying(self.failures.append)
        store = SimpleNamespace(read_into=self._read_into)
        self.stages: Any = {0: SimpleNamespace(store=store)}

    def _read_into(self, key: Any, memory: Any) -> Any:
        memory[:NBYTES] = self.value
        return memory[:NBYTES]

    def send(self, piece: Copied) -> None:
        assert self.open.wait(10.0)
        self.sent.append(Copied(piece.number, {k: v.copy() for k, v in piece.values.items()}))

    def copy(self, number: int, send: Any) -> threading.Thread:
        asked = Copy(number=number, memory=None, nbytes=NBYTES, places={0: {KEY: 0}})
        self.copying.copy(asked, self.stages, self.sent.append, send)
        return self.copying._sender


def test_a_later_copy_leaves_one_that_is_being_sent() -> None:
    worker = Worker()
    threads = []
    for number in (1, 2):
        worker.value[:] = number
        threads.append(worker.copy(number, worker.send))
    worker.open.set()
    for thread in threads:
        thread.join(10.0)
    assert {piece.number: set(piece.values[KEY].tolist()) for piece in worker.sent} == {
        1: {1}, 2: {2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("error", "is_reported"),
    [(OSError(errno.EMFILE, "too many files"), True), (BrokenPipeError(), False)],
    ids=["no-descriptor", "no-controller"],
)
def test_the_error_of_a_copy_is_reported(error: OSError, is_reported: bool) -> None:
    def send(piece: Copied) -> None:
        raise error

    worker = Worker()
    worker.copy(1, send).join(10.0)
    assert worker.failures == ([error] if is_reported else [])
