"""The fork server, which forks a worker per request, and the process of a worker: its main thread
and its sending thread.

`hetpipe.crew.forkserver` runs the server as a process. The server imports torch once, before any
thread exists. Each worker starts with torch imported, on its cores, in the controller's folder
and with its own environment variables. Workers share all memory that they never write to.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

from hetpipe.wire.channel import Channel
from hetpipe.wire.messages import STATUS, Beat, Failure, Fork, Open, Stop
from hetpipe.worker.blame import summary, trace_of
from hetpipe.worker.service import Service

PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
TIMERSLACK_NS = 1000  # the default, 50 us, would lengthen emulated passes and transfers
CHANNEL = 3  # a worker's descriptors are 0 to 3
FIRST_FREE = 4
SWITCH_INTERVAL_S = 2e-4  # edge threads must not wait 5 ms for the compute thread


def main(fd: int, controller: int) -> None:
    """Fork workers until process `controller` has ended or closes its end of the channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection would write to memory that all workers share
    channel = Channel(socket.socket(fileno=fd))
    try:
        watched = os.pidfd_open(controller)  # a fork of the controller may keep the socket open
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(watched, select.POLLIN)
    workers: dict[int, tuple[int, int]] = {}  # process id and status pipe, by pidfd
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        for descriptor in ready:
            if descriptor in workers:
                poll.unregister(descriptor)
                _report_end(descriptor, *workers.pop(descriptor))
        if watched in ready:
            return
        if channel.fileno() in ready:
            try:
                request, descriptors = channel.receive()
            except EOFError:
                return
            status = descriptors.pop()
            # The crew may have closed the channel while torch was loaded.
            pid = None if _is_closed(descriptors[0]) else _fork(request, descriptors)
            for received in descriptors:
                os.close(received)
            if pid is None:
                os.close(status)
                continue
            with suppress(BrokenPipeError):
                os.write(status, STATUS.pack(pid))
            ended = os.pidfd_open(pid)
            poll.register(ended, select.POLLIN)
            workers[ended] = pid, status


def _is_closed(channel: int) -> bool:
    poll = select.poll()
    poll.register(channel, 0)  # reports only that the other end is closed
    return bool(poll.poll(0))


def _fork(request: Fork, descriptors: list[int]) -> int | None:
    """Return the worker's process id. If no process can start, report that and return None."""
    server, channel = os.getpid(), descriptors[0]
    try:
        pid = os.fork()
    except OSError as error:
        _report(channel, error)
        return None
    if pid:
        return pid
    try:
        _keep_descriptors(descriptors, server)
        channel = CHANNEL
        _set_up(request)
        serve(CHANNEL)
    except BaseException as error:
        _report(channel, error)
    finally:
        sys.stderr.flush()
        os._exit(1)


def _report(channel: int, error: BaseException) -> None:
    """Tell the controller why a worker does not start."""
    with socket.socket(fileno=os.dup(channel)) as end, suppress(OSError):
        Channel(end).send(Failure("start", summary(error), trace_of(error)))


def _keep_descriptors(descriptors: list[int], server: int) -> None:
    """Let this worker die with the server, and keep only the descriptors of the request."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    libc.prctl(PR_SET_TIMERSLACK, TIMERSLACK_NS)
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, FIRST_FREE) for fd in descriptors]
    for fd, place in zip(moved, (CHANNEL, 1, 2), strict=True):
        os.dup2(fd, place)
    os.closerange(CHANNEL + 1, os.sysconf("SC_OPEN_MAX"))


def _set_up(request: Fork) -> None:
    """Take over the request's folder, module path, variables and cores."""
    os.chdir(request.folder)
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.variables)
    if request.cores:
        os.sched_setaffinity(0, request.cores)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def _report_end(descriptor: int, pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody waits for the status
        os.write(status, STATUS.pack(code))
    os.close(status)
    os.close(descriptor)


def serve(fd: int) -> None:
    """Serve the controller at the other end of descriptor `fd` until it stops or dies."""
    channel = Channel(socket.socket(fileno=fd))
    order = channel.receive()[0]
    assert isinstance(order, Open)

    answers: SimpleQueue[object] = SimpleQueue()

    def send() -> None:
        """Send answers on an extra thread, so that the compute thread never waits."""
        while True:
            message = answers.get()
            try:
                channel.send(message)
            except ConnectionError:
                os._exit(1)  # the controller is gone
            except Exception as error:  # pickling failed, or memory ran out
                service.fail(error)
            if isinstance(message, Failure):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)

    service = Service(order, answers.put, send_beside=channel.send_beside)

    def beat() -> None:
        while True:
            answers.put(Beat(service.doing))
            time.sleep(order.heartbeat_s)

    sender = threading.Thread(target=send, name="answers", daemon=True)
    sender.start()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    threading.Thread(target=service.serve, name="compute", daemon=True).start()
    # This thread only listens, so it notices the controller's end while other threads wait.
    try:
        while True:
            message, fds = channel.receive()
            if isinstance(message, Stop):
                break
            service.deliver(message, fds)
    except EOFError:
        os._exit(1)
    except Exception as error:  # the message refers to unknown modules
        service.fail(error)
        sender.join()  # the sender ends the process after the failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
