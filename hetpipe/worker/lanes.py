"""The lanes of a worker: rows of a schedule that it walks at once, one thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from hetpipe.schedule.action import Message
from hetpipe.wire.edges import OnError
from hetpipe.wire.transport import EdgeClosedError


class HandOver:
    """Hands micro-batches from one lane of a worker to another: messages K and V, without a tensor.

    Both lanes share the stage, which has the tensors.
    """

    def __init__(self) -> None:
        self._handed_over: set[Message] = set()
        self._changed = threading.Condition()
        self._closed = False

    def give(self, message: Message) -> None:
        """Hand a message over."""
        with self._changed:
            self._handed_over.add(message)
            self._changed.notify_all()

    def take(self, message: Message) -> None:
        """Wait for a message from another lane. Raises `EdgeClosedError` when closed."""
        with self._changed:
            while message not in self._handed_over:
                if self._closed:
                    raise EdgeClosedError
                self._changed.wait()
            self._handed_over.remove(message)

    def close(self) -> None:
        """Wake the lanes that wait."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def walk(lanes: Sequence[Callable[[], None]], hand_over: HandOver, on_error: OnError) -> None:
    """Walk all lanes to their ends, the first one on this thread; raise the first error.

    An error is reported at once, since only the controller can end the waits of the other lanes.
    """
    errors: list[BaseException] = []

    def guarded(lane: Callable[[], None]) -> None:
        try:
            lane()
        except BaseException as error:
            errors.append(error)
            if not isinstance(error, EdgeClosedError):
                on_error(error)
            hand_over.close()

    threads = [threading.Thread(target=guarded, args=(lane,), daemon=True) for lane in lanes[1:]]
    for thread in threads:
        thread.start()
    guarded(lanes[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
