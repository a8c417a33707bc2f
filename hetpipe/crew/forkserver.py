"""Starts workers through fork servers: processes that have imported torch already.

    controller                     fork server                    worker
    Popen ------------------------> import torch
    Fork, descriptors ------------> fork() ----------------------> cores, variables, folder
    <------------------ STATUS: pid on the worker's pipe
    <======================= the worker's channel: Open, ... ====>
    <----------- STATUS: its end   <---------------------- exit

A library reads its environment variables when it is loaded, so workers with different values of
these variables come from different servers. A server serves all crews of the controller, and ends
with the controller.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hetpipe import process
from hetpipe.errors import WorkerError
from hetpipe.hosts.guard import guard_process
from hetpipe.sockets import socket_pair
from hetpipe.wire.channel import Channel
from hetpipe.wire.messages import STATUS, Fork
from hetpipe.worker.blame import summary

REPORT_S = 1.0
"""Seconds in which a server that runs reports the end of a killed worker."""
UNKILLABLE_S = 10.0
"""Seconds after which a killed worker counts as ended although it is there: a driver may keep it in
the kernel for ever."""
FORK_S = 0.5
"""Seconds in which a server that has loaded torch forks its workers."""
READ_WHEN_LOADED = (
    "LD_", "GLIBC_", "MALLOC_", "PYTHON", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_",
    "TORCH", "PYTORCH", "ATEN_", "C10_", "DNNL_", "ONEDNN_", "CUDA_", "NVIDIA_", "HIP_", "ROCR_",
)  # fmt: skip
"""Prefixes of the variables that Python, glibc, torch and its libraries read when they are loaded.
All other variables are set in the worker."""
READ_WHEN_USED = ("TORCHINDUCTOR_CACHE_DIR",)
"""Variables that begin so, and that torch sets in this process while a model is captured. They need
no further server, which would first load torch."""

log = logging.getLogger("hetpipe")


class WorkerProcess:
    """A worker's process, as the controller sees it."""

    def __init__(self, status: int, server: subprocess.Popen[bytes]) -> None:
        self.server = server
        self._status = status  # the reading end of the worker's pipe
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def pid(self) -> int | None:
        """The process id, once the server has forked the worker."""
        self._advance(0.0)
        return self._pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, or minus the number of the signal that killed the worker; None
        after the timeout."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._code is None:
            left_s = end_s - time.monotonic()
            if not self._advance(None if timeout_s is None else max(left_s, 0.0)):
                break
        return self._code

    def kill(self) -> None:
        """Kill the worker, if it still runs."""
        if self.wait(0.0) is None and self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def wait_for_end(self, fork_s: float) -> None:
        """Wait until a killed worker, whose channel is closed, has ended.

        A server that is stopped would never report it. One that forks nothing for `fork_s` seconds
        still loads torch, and will not start this worker. A worker that a driver keeps in the
        kernel is left behind.
        """
        end_s = time.monotonic() + UNKILLABLE_S
        while self.wait(REPORT_S if self.pid else fork_s) is None:
            if process.is_stopped(self.server.pid):
                self.server.kill()
            elif self._pid is None:
                self._end(-signal.SIGKILL)
            elif time.monotonic() > end_s:
                log.warning(
                    "worker process %d was killed %.0f s ago and has not ended, since a driver "
                    "keeps it in the kernel: it is left behind, and its device may be unusable "
                    "until the next boot", self._pid, UNKILLABLE_S,
                )  # fmt: skip
                self._end(-signal.SIGKILL)

    def _advance(self, timeout_s: float | None) -> bool:
        """Return whether the server has reported the worker's start or end within the timeout."""
        if self._code is not None:
            return False
        poll = select.poll()
        poll.register(self._status, select.POLLIN)
        if not poll.poll(None if timeout_s is None else 1e3 * timeout_s):
            return False
        data = os.read(self._status, STATUS.size)
        if data and self._pid is None:
            (self._pid,) = STATUS.unpack(data)
            return True
        # If the pipe ends without a status, the server has died, and the worker with it.
        self._end(STATUS.unpack(data)[0] if data else -signal.SIGKILL)
        return True

    def _end(self, code: int) -> None:
        self._code = code
        os.close(self._status)


class ForkServer:
    """A process that forks workers. Raises `WorkerError` if the system does not start it."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        ours, theirs = socket_pair()
        with theirs:
            # The server inherits the mask, so Ctrl-C only ever reaches the controller.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self._process = subprocess.Popen(
                    process.command("hetpipe.worker.forkserver", theirs.fileno(), os.getpid()),
                    env=process.environment(variables),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise WorkerError(f"the workers cannot be started: {summary(error)}") from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._channel = Channel(ours)
        self._guarded = guard_process(self._process.pid)

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, channel: socket.socket, cores: Sequence[int], variables: Mapping[str, str]
    ) -> WorkerProcess:
        """Return a new worker, which gets the socket `channel`. Raises `OSError`."""
        if not self._guarded:  # this process may have met other hosts since
            self._guarded = guard_process(self._process.pid)
        request = Fork(tuple(cores), os.getcwd(), tuple(process.ordered(sys.path)), dict(variables))
        ours, theirs = os.pipe()
        try:
            self._channel.send(request, [channel.fileno(), 1, 2, theirs])
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return WorkerProcess(ours, self._process)

    def close(self) -> None:
        """End the server and its workers."""
        self._channel.close()
        self._process.kill()
        self._process.wait()


_servers: dict[tuple[int, tuple[tuple[str, str], ...]], ForkServer] = {}
"""The servers, by (process id of the owner, variables). A fork of the controller starts its own."""
# Held while a server is looked up or started, so that two crews do not start the same server; never
# held while a thread waits for a worker.
_starting = threading.Lock()


def start_worker(
    channel: socket.socket, cores: Sequence[int], settings: Mapping[str, str]
) -> WorkerProcess:
    """Start a worker process with these cores, and with `settings` in its environment."""
    variables = {**os.environ, **settings}
    return server_for(settings).fork(channel, cores, variables)


def server_for(settings: Mapping[str, str]) -> ForkServer:
    """Return the server for workers with `settings`; start the server if necessary."""
    variables = {**os.environ, **settings}
    early = {
        name: text
        for name, text in variables.items()
        if name.startswith(READ_WHEN_LOADED) and name not in READ_WHEN_USED
    }
    key = os.getpid(), tuple(sorted(early.items()))
    with _starting:
        server = _servers.get(key)
        if server is not None and not server.runs:
            server.close()
            server = None
        if server is None:
            server = _servers[key] = ForkServer(settings)
    return server


def close_servers() -> None:
    """End the servers of this process."""
    with _starting:
        for key in [key for key in _servers if key[0] == os.getpid()]:
            _servers.pop(key).close()


# At exit, finalizers run in reverse order of creation, so crews end before their servers.
weakref.finalize(ForkServer, close_servers)
