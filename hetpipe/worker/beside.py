"""The controller's messages that come beside its commands: factors of gradients, and leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from hetpipe.wire.messages import Feed, Feeds, Scale
from hetpipe.wire.transport import EdgeClosedError

T = TypeVar("T")


class Beside:
    """Keeps messages until a thread needs them. After `stop`, waits end with `EdgeClosedError`."""

    def __init__(self) -> None:
        self._scales: dict[tuple[int, bool], Scale] = {}
        self._feeds: dict[int, Feeds] = {}  # the latest two, by number
        # Held while messages are read or added; never while one is sent, nor while a pass runs.
        self._changed = threading.Condition()
        self._stopped = False

    def deliver(self, message: Scale | Feed) -> None:
        """Keep a message, and wake the threads that wait."""
        with self._changed:
            if isinstance(message, Scale):
                self._scales[message.serial, message.clips] = message
            else:
                latest = list(self._feeds.items())[-1:]
                self._feeds = {**dict(latest), message.number: message.feeds}
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def scale(self, serial: int, clips: bool) -> Scale:
        """Wait for an answer that the controller sends for a mini-batch (station 13)."""
        scale = self._await(lambda: self._scales.get((serial, clips)))
        with self._changed:
            for old in [key for key in self._scales if key[0] < serial]:
                del self._scales[old]
        return scale

    def feeds(self, number: int) -> Feeds:
        """Wait for the leaves that the controller sends ahead."""
        return self._await(lambda: self._feeds.pop(number, None))

    def _await(self, find: Callable[[], T | None]) -> T:
        with self._changed:
            while (found := find()) is None:
                if self._stopped:
                    raise EdgeClosedError
                self._changed.wait()
            return found
