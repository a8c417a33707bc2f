"""The process of one worker, forked by the fork server: its main thread, and the sending thread."""

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

    service = Service(order, answers.put)

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
        sender.join()  # it ends the process after sending the failure
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
