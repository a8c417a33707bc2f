"""A process beside a controller or an agent. If a signal stops that process, the guard ends its
workers and its connections, so that other hosts know.

    the guarded process                     the guard
    sockets, pidfds of fork servers ------>  looks again and again whether the process is stopped

The guard is in another process group, so that Ctrl-Z does not stop it as well.
"""

from __future__ import annotations

import atexit
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

from hetpipe import process
from hetpipe.errors import ClusterError
from hetpipe.sockets import socket_of, socket_pair


class _Guard(NamedTuple):
    """A guard's process and the way to it."""

    process: subprocess.Popen[bytes]
    link: socket.socket


_guards: dict[int, _Guard] = {}
"""By guarded process: a fork of one starts a guard for itself."""
# Held while a guard starts, so that a process has only one; never while a thread waits.
_starting = threading.Lock()


def guard_connection(sock: socket.socket) -> None:
    """Let the guard end a connection if this process is stopped. The first call starts it."""
    with _starting:
        if os.getpid() not in _guards:
            _guards[os.getpid()] = _start()
    _give(sock.fileno())


def guard_process(pid: int) -> bool:
    """Let the guard end a child if this process is stopped; return whether there is a guard."""
    if os.getpid() not in _guards:
        return False
    descriptor = os.pidfd_open(pid)
    _give(descriptor)
    os.close(descriptor)
    return True


def _give(descriptor: int) -> None:
    with suppress(OSError):  # the guard was killed; silence is noticed as well, only later
        socket.send_fds(_guards[os.getpid()].link, [b"\1"], [descriptor])


def _start() -> _Guard:
    ours, theirs = socket_pair()
    with theirs:
        try:
            started = subprocess.Popen(
                process.command(__name__, theirs.fileno(), os.getpid()),
                env=process.environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            why = process.start_refusal(error) or error
            raise ClusterError(f"the guard of this process cannot be started: {why}") from error
    return _Guard(started, ours)


@atexit.register
def _end_guard() -> None:
    if (guard := _guards.pop(os.getpid(), None)) is not None:
        guard.link.close()
        guard.process.kill()
        guard.process.wait()


def main(fd: int, guarded: int) -> None:
    """Guard a process until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        watched = os.pidfd_open(guarded)  # a fork of the guarded process may keep the socket open
    except ProcessLookupError:
        return
    link, held, poll = socket_of(fd), set[int](), select.poll()
    poll.register(link, select.POLLIN)
    poll.register(watched, select.POLLIN)
    stopped, look_s = 0, time.monotonic()  # successive looks, and when the next one is due
    while True:
        for descriptor, _ in poll.poll(1e3 * max(look_s - time.monotonic(), 0.0)):
            if descriptor == watched:
                for each in held:
                    _end(each)
                return
            if descriptor in held:  # the connection or the child has ended
                poll.unregister(descriptor)
                held.remove(descriptor)
                os.close(descriptor)
                continue
            data, descriptors, _, _ = socket.recv_fds(link, 1, 1)
            if not data:
                return
            for given in descriptors:
                held.add(given)
                poll.register(given, 0 if _is_socket(given) else select.POLLIN)
        if time.monotonic() < look_s:
            continue
        stopped = stopped + 1 if process.is_stopped(guarded) else 0
        look_s = time.monotonic() + process.LOOK_S
        if stopped == process.STOPPED_LOOKS:
            for each in held:
                _end(each)


def _is_socket(descriptor: int) -> bool:
    return stat.S_ISSOCK(os.fstat(descriptor).st_mode)


def _end(descriptor: int) -> None:
    with suppress(OSError):
        if _is_socket(descriptor):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        else:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
