"""A process counts as lost if it is stopped or rests, not while it works or is examined."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from hetpipe import process
from hetpipe.crew.vigil import Vigil
from hetpipe.process import LOOK_S, STOPPED_LOOKS

SILENCE_S = 12 * LOOK_S
PTRACE_ATTACH = 16


@pytest.fixture
def resting() -> Iterator[int]:
    with subprocess.Popen(["sleep", "600"]) as child:
        wait_for(child.pid, "S")
        yield child.pid
        child.kill()


def wait_for(pid: int, state: str) -> None:
    while process.thread_states(pid) != state:
        time.sleep(0.01)


def looks(vigil: Vigil, pid: int, most: int = 100) -> tuple[int, str]:
    """Return how many looks find no problem, and the problem."""
    for count in range(most):
        if problem := vigil.look(pid):
            return count + 1, problem
    return most, ""


def test_a_stopped_process_is_lost_after_successive_looks(resting: int) -> None:
    vigil = Vigil(SILENCE_S)
    os.kill(resting, signal.SIGSTOP)
    wait_for(resting, "T")
    assert looks(vigil, resting, STOPPED_LOOKS - 1)[1] == ""
    os.kill(resting, signal.SIGCONT)
    wait_for(resting, "S")
    assert looks(vigil, resting, 1)[1] == ""
    os.kill(resting, signal.SIGSTOP)
    wait_for(resting, "T")
    count, problem = looks(vigil, resting)
    assert count == STOPPED_LOOKS
    assert problem.startswith("is stopped, perhaps by the signal SIGSTOP")


def test_a_silent_process_is_lost_while_it_rests(resting: int) -> None:
    vigil = Vigil(SILENCE_S)
    assert looks(vigil, resting)[1] == ""  # it has not begun
    for _ in range(2):  # a message begins the silence anew
        vigil.hear()
        assert looks(vigil, resting, 12)[1] == ""
    vigil.hear()
    assert looks(vigil, resting) == (14, "has given no sign of life for 3 s: it is stuck")


def test_a_silent_process_is_not_lost_while_it_computes() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        vigil = Vigil(SILENCE_S)
        vigil.hear()
        wait_for(child.pid, "R")
        assert looks(vigil, child.pid)[1] == ""
        child.kill()


def test_a_process_that_a_debugger_holds_is_not_lost(resting: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(PTRACE_ATTACH, resting, None, None):
        pytest.skip(f"this system allows no ptrace: {os.strerror(ctypes.get_errno())}")
    os.waitpid(resting, 0)
    wait_for(resting, "t")
    vigil = Vigil(SILENCE_S)
    vigil.hear()
    assert looks(vigil, resting)[1] == ""


def test_a_guard_spares_a_process_that_is_stopped_for_a_moment(resting: int) -> None:
    """Ends of connections wake the guard, which must not count them as looks."""
    ours, theirs = socket.socketpair()
    pairs = [socket.socketpair() for _ in range(2 * STOPPED_LOOKS)]
    command = process.command("hetpipe.hosts.guard", theirs.fileno(), resting)
    environment = process.environment()
    with theirs, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]) as guard:
        for near, _ in pairs:
            socket.send_fds(ours, [b"\1"], [near.fileno()])
            while "S" not in process.thread_states(guard.pid):
                time.sleep(0.01)
        kept, *others = pairs
        os.kill(resting, signal.SIGSTOP)
        wait_for(resting, "T")
        for near, far in others:
            near.close()
            far.close()
            time.sleep(LOOK_S / 20)
        os.kill(resting, signal.SIGCONT)
        kept[1].settimeout(2 * LOOK_S)
        with pytest.raises(TimeoutError):
            kept[1].recv(1)  # would be b"" if the guard had ended it
        os.kill(resting, signal.SIGSTOP)
        kept[1].settimeout(30.0)
        assert kept[1].recv(1) == b""
        ours.close()
    for end in kept:
        end.close()
