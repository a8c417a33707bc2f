"""The error names the cause of a worker's failure, even if the worker ends at once."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import engine_backends
import pytest

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew import forkserver as servers
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, HetpipeError, WorkerError
from hetpipe.wire.channel import Channel
from hetpipe.wire.messages import Failure, Fork
from hetpipe.worker import forkserver


class Unloadable:
    """An object that can be pickled but raises a NameError when it is loaded."""

    def __reduce__(self) -> Any:
        return eval, ("nowhere",)


def start() -> Crew:
    return Crew.start(Cluster((Member("m0", "numpy:cpu:0"),)))


@pytest.mark.slow
def test_an_unloadable_message_is_explained() -> None:
    """The worker must send its failure before it ends."""
    for _ in range(8):
        with start() as crew, pytest.raises(WorkerError, match="NameError: name 'nowhere'"):
            crew.call(["m0"], "builtins:id", Unloadable())


def test_a_failed_set_up_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/nowhere")
    with pytest.raises(WorkerError, match=r"'m0' .* failed at start: File.*/nowhere"):
        start()


def test_a_lack_of_file_descriptors_is_explained() -> None:
    text = f"failed.*: OSError: .*{os.strerror(errno.EMFILE)}"
    with start() as crew, pytest.raises(WorkerError, match=text):
        crew.call(["m0"], "engine_backends:without_descriptors", engine_backends.LARGE_NBYTES)


@contextmanager
def no_further_files() -> Iterator[None]:
    """Let this process open no further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)  # the system gives the lowest number
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


NO_FILES = "may open no further files, .* raise the limit"


def test_a_channel_without_room_for_descriptors_says_so() -> None:
    left, right = (Channel(end) for end in socket.socketpair())
    left.send("two", [0, 1])
    with no_further_files(), pytest.raises(HetpipeError, match=NO_FILES):
        right.receive()
    left.close()
    right.close()


def test_no_worker_is_lost_if_the_controller_may_open_no_further_files() -> None:
    with start() as crew, no_further_files():
        with pytest.raises(WorkerError, match=f"'m0' .* cannot be received: .*{NO_FILES}"):
            crew.call(["m0"], "engine_backends:large")
        assert not crew.lost


REFUSED = "the system allows no more processes or threads .*ulimit -u.* raise the limit"


def refuse(*args: Any, **kwargs: Any) -> Any:
    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def test_a_failed_fork_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(os, "fork", refuse)
    with ours, theirs:
        request = Fork((), os.getcwd(), (), {})
        assert forkserver._fork(request, [theirs.fileno(), 1, 2]) is None
        failure, _ = Channel(ours).receive()
    assert isinstance(failure, Failure)
    with pytest.raises(HetpipeError, match=REFUSED):
        raise HetpipeError(failure.summary)


def test_a_missing_fork_server_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", refuse)
    monkeypatch.setattr(servers, "_servers", {})
    with pytest.raises(WorkerError, match=f"the workers cannot be started: {REFUSED}"):
        start()


def test_a_missing_thread_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    start().close()  # start the fork server before the test
    files = len(os.listdir("/proc/self/fd"))

    begin = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == refuses:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    refuses = "ask numpy"
    with pytest.raises(BackendError, match=REFUSED):
        start()
    refuses = "hetpipe crew"
    with pytest.raises(WorkerError, match=f"the workers cannot be started: {REFUSED}"):
        start()
    assert len(os.listdir("/proc/self/fd")) == files
