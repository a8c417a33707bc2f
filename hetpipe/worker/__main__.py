"""The process of one worker: arguments FD PARENT CORES, started by `hetpipe.process.command`.

Imports nothing heavy before cores and signals are set: thread pools read them once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_TIMERSLACK = 29
TIMERSLACK_NS = 1000  # 50 us by default, which emulated links and speeds would be late by
SWITCH_INTERVAL_S = 2e-4  # edge threads must not wait 5 ms for a compute thread inside Python


def main(arguments: list[str]) -> None:
    """Serve the controller at the other end of descriptor FD until it stops or dies."""
    fd, parent = int(arguments[0]), int(arguments[1])
    cores = [int(core) for core in arguments[2].split(",") if core]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with(parent)
    _wake_in_time()
    if cores:
        os.sched_setaffinity(0, cores)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _serve(fd)


def _die_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _wake_in_time() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, TIMERSLACK_NS)


def _serve(fd: int) -> None:
    import socket
    import threading
    import time
    from queue import SimpleQueue

    from hetpipe.wire.channel import Channel
    from hetpipe.wire.messages import Beat, Failure, Open, Stop
    from hetpipe.worker.service import Service

    channel = Channel(socket.socket(fileno=fd))
    order = channel.receive()[0]
    assert isinstance(order, Open)

    answers: SimpleQueue[object] = SimpleQueue()

    def send() -> None:
        """Runs on a thread of its own, so that the compute thread goes on at once."""
        while True:
            message = answers.get()
            try:
                channel.send(message)
            except OSError:
                os._exit(1)  # the controller is gone
            except Exception as error:  # a message that does not pickle
                service.fail(error)
            if isinstance(message, Failure):
                sys.stderr.flush()
                os._exit(1)

    service = Service(order, answers.put)

    def beat() -> None:
        while True:
            answers.put(Beat(service.doing))
            time.sleep(order.heartbeat_s)

    threading.Thread(target=send, name="answers", daemon=True).start()
    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    threading.Thread(target=service.serve, name="compute", daemon=True).start()
    # This thread only listens, so it notices the controller's end even while all others wait.
    try:
        while True:
            message, fds = channel.receive()
            if isinstance(message, Stop):
                break
            service.deliver(message, fds)
    except EOFError:
        os._exit(1)
    except Exception as error:  # a message that names modules unknown here
        service.fail(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
