"""Runs modules in processes that may crash or hang, and exchanges lines of JSON with them.

    this process: Child                        the module: Parent
    send(request)    --- standard input --->   requests()
    receive(limit_s) <-- standard output ---   send(message)
    ChildEnded.log   <-- standard error ----   all prints and warnings

A child leads a new process group: Ctrl-C reaches only the parent, and `close` kills the group.
The system ends a child together with the thread that started it, so that no child outlives its
parent.

A child that takes seconds to load can run many tasks, each in a fork of the child: see `Child.fork`
and, in the child, `Parent.run_forks`. Before a fork, the child may start no thread and open no
driver.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hetpipe import process
from hetpipe.errors import HetpipeError
from hetpipe.memory import anonymous_file

GRACE_S = 10.0
"""Time limit for a child to end after it has closed its standard output."""
LOG_NBYTES = 1 << 18
"""Most bytes to read from the end of a child's standard error."""


class ChildError(HetpipeError):
    """A child could not start, has ended, or sent no message in time."""


class ChildLate(ChildError):
    """A child sent no message within the time limit."""


class ChildEnded(ChildError):
    """A child, or its fork, ended instead of sending a message."""

    def __init__(self, module: str, code: int, log: str) -> None:
        self.code = code
        """Exit status, or minus the number of the signal that killed the child."""
        self.log = log
        """End of the child's standard error."""
        self.how = _signal_name(-code) if code < 0 else f"exit status {code}"
        """Reason in words: "signal 11 (SIGSEGV)", "exit status 1"."""
        self.last_line = (log.strip().splitlines() or [""])[-1].strip()
        """Last line of `log`."""
        super().__init__(
            f"{module} ended with {self.how}" + (f": {self.last_line}" if self.last_line else "")
        )


class Child:
    """A process that runs `python -m MODULE ARGUMENTS...` until `close`; a context manager.

    The child gets this process's variables and `environment`, and runs only on `cores`, if any.
    Raises `ChildError` if the system cannot start a process.
    """

    def __init__(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] = (),
    ) -> None:
        self.module = module
        parent = {process.PARENT: str(os.getpid())}
        self._log = open(anonymous_file(), "r+b")  # noqa: SIM115 - `close` closes it
        try:
            with _pinned(cores):
                self._process = subprocess.Popen(
                    process.command(module, *arguments),
                    env=process.environment({**(environment or {}), **parent}),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._log,
                    start_new_session=True,
                )
        except OSError as error:
            self._log.close()
            reason = process.start_refusal(error) or str(error)
            raise ChildError(f"{module} cannot be started: {reason}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._end = os.pidfd_open(self._process.pid)  # readable once the child has ended
        self._unread = b""
        self._forks = 0
        self._log_start = 0  # where the current fork's log begins
        self._last_log = ""

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the descriptor of the messages, for `select`."""
        return self._output.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not _readable([self._end], 0.0)

    def send(self, request: Mapping[str, Any]) -> None:
        """Send a request. Raises `ChildEnded` if the child has ended."""
        if self._process.returncode is not None:
            raise self._ended()
        try:
            self._input.write(json.dumps(request).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def receive(self, limit_s: float | None = None) -> dict[str, Any]:
        """Return the next message; skip lines that are no messages.

        Raises `ChildEnded` if the child or its fork ends first, and `ChildLate` after `limit_s`.
        """
        if self._process.returncode is not None:
            raise self._ended()
        end_s = math.inf if limit_s is None else time.monotonic() + limit_s
        while True:
            line, newline, rest = self._unread.partition(b"\n")
            if newline:
                self._unread = rest
                message = _message(line)
                if message is None or message.get("fork", self._forks) != self._forks:
                    continue
                if "fork" in message:
                    raise ChildEnded(self.module, message["code"], self._read_log())
                return message
            ready = _readable([self.fileno(), self._end], end_s - time.monotonic())
            if not ready:
                raise ChildLate(f"{self.module} gave no answer within {limit_s:g} s")
            # The output may stay open after the child's end: the child's own children have it, too.
            part = os.read(self.fileno(), 1 << 16) if self.fileno() in ready else b""
            if not part:
                raise self._ended()
            self._unread += part

    def fork(self, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        """Run the function of `Parent.run_forks` with `arguments` in a fork of the child.

        The fork gets this process's current folder, import path and variables, and `environment`.
        `receive` returns the fork's messages, then raises `ChildEnded`. After a `ChildLate`, close
        the child.
        """
        self._forks += 1
        self._log_start = os.fstat(self._log.fileno()).st_size
        request = {
            "fork": self._forks,
            "arguments": [str(argument) for argument in arguments],
            "environment": {**os.environ, **(environment or {})},
            "folder": os.getcwd(),
            "path": process.ordered(sys.path),
        }
        self.send(request)

    def close(self) -> None:
        """Kill the process, and all processes of its group."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
            with suppress(BrokenPipeError):
                self._input.close()
            self._output.close()
            self._log.close()
            os.close(self._end)

    def _ended(self) -> ChildEnded:
        if self._process.returncode is None:
            _readable([self._end], GRACE_S)
            self._last_log = self._read_log()
            self.close()
        return ChildEnded(self.module, self._process.returncode, self._last_log)

    def _read_log(self) -> str:
        descriptor = self._log.fileno()
        start = max(self._log_start, os.fstat(descriptor).st_size - LOG_NBYTES)
        return os.pread(descriptor, LOG_NBYTES, start).decode(errors="replace")


def ask(children: Sequence[Child], request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Send the same request to all children and return their answers.

    Raises `ChildEnded` as soon as one child has ended, since the others may wait for it.
    """
    for child in children:
        child.send(request)
    answers: dict[Child, dict[str, Any]] = {}
    while waiting := [child for child in children if child not in answers]:
        for child in select.select(waiting, [], [])[0]:
            answers[child] = child.receive()
    return [answers[child] for child in children]


class Parent:
    """The process that started this one as a `Child`.

    Once this object exists, this process has no standard input, and prints to standard error.
    """

    def __init__(self) -> None:
        self._input, self._output = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the requests until standard input ends."""
        for line in self._input:
            yield json.loads(line)

    def send(self, message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=self._output, flush=True)

    def run_forks(self, function: Callable[..., None]) -> None:
        """For each `Child.fork`, run `function` in a fork; the arguments are strings.

        One fork runs at a time. This process serves all threads of the parent. So it ends when its
        standard input ends, not with the thread that started it.
        """
        process.end_with(None)
        for request in self.requests():
            server, pid = os.getpid(), os.fork()
            if pid == 0:
                _run_fork(function, request, server)
            end = os.pidfd_open(pid)
            poll = select.poll()
            poll.register(end, select.POLLIN)
            poll.register(self._input, 0)  # reports only the end of the input
            if end not in dict(poll.poll()):
                return  # and the fork ends with this process
            os.close(end)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self.send({"fork": request["fork"], "code": code})


def _run_fork(function: Callable[..., None], request: Mapping[str, Any], server: int) -> None:
    code = 1
    try:
        process.end_with(server)
        os.chdir(request["folder"])
        sys.path[:] = request["path"]
        os.environ.clear()
        os.environ.update(request["environment"])
        function(*request["arguments"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def _pinned(cores: Collection[int]) -> Iterator[None]:
    """Pin this thread, and the processes that it starts, to `cores` in the `with` block."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _readable(descriptors: Sequence[int], limit_s: float) -> list[int]:
    """Wait up to `limit_s` until a descriptor can be read; return all that can be read."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    limit_ms = None if limit_s == math.inf else max(0, math.ceil(1e3 * limit_s))
    return [descriptor for descriptor, _ in poll.poll(limit_ms)]


def _message(line: bytes) -> dict[str, Any] | None:
    """Return the message in a line, or None if the line is not a JSON object."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None


def _signal_name(number: int) -> str:
    with suppress(ValueError):  # a real-time signal has no name
        return f"signal {number} ({signal.Signals(number).name})"
    return f"signal {number}"
