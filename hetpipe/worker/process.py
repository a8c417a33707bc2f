"""The process of one worker, which the fork server has forked: its main thread, and the thread that
answers."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from queue import SimpleQueue

from hetpipe.wire.channel import Channel
from hetpipe.wire.messages import Beat, Failure, Open, Stop
from hetpipe.worker.service import Service


def serve(fd: int) -> None:
    """Serve the controller at the other end of descriptor `fd` until it stops or dies."""
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
            except ConnectionError:
                os._exit(1)  # the controller is gone
            except Exception as error:  # a message that does not pickle, or finds no memory
                service.fail(error)
            if isinstance(message, Failure):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)

    service = Service(order, answers.put)

    def beat() -> None:
        while True:
            answers.put(Beat(service.doing))
            time.sleep(order.heartbeat_s)

    sender = threading.Thread(target=send, name="answers", daemon=True)
    sender.start()
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
        sender.join()  # which ends the process, once the failure is sent
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
