"""Sends the leaves of the next mini-batch to the workers of other hosts while these compute."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.request import Request, StepRequest
from hetpipe.errors import HetpipeError
from hetpipe.wire.messages import Feed, Feeds

Hook = Callable[[], None]
"""Called on the user's thread while the workers compute."""


def nothing() -> None:
    """Do nothing meanwhile."""


_numbers = itertools.count(1)  # of all crews, so that no crew takes another one's leaves


class Feeding:
    """Sends one mini-batch ahead at a time, on a thread. `send` gives a member a message."""

    def __init__(self, cluster: Cluster, send: Callable[[str, Feed], None]) -> None:
        hosts, members = cluster.connections, cluster.members
        self.members = frozenset(m.id for m in members if hosts and m.host != hosts.own.name)
        """The members on other hosts."""
        self._send_to = send
        self._number = self._loading = 0  # of the latest leaves
        self._thread: threading.Thread | None = None

    def begin(self, feeds: Mapping[str, Feeds], loading: int) -> int:
        """Begin to send leaves, by member. Return a number for `StepRequest.fed`.

        `loading` is the number of the loading for whose stages these leaves are.
        """
        self.wait()
        self._number, self._loading = next(_numbers), loading
        args = self._number, feeds
        self._thread = threading.Thread(
            target=self._send, args=args, name="hetpipe feed", daemon=True
        )
        self._thread.start()
        return self._number

    def wait(self) -> None:
        """Wait until all leaves have left, so that their arrays may change."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def fed(self, request: Request, loading: int) -> frozenset[str]:
        """Return the members that have the leaves of a request, for these stages. These are the
        latest leaves that were sent ahead; others, as of an earlier crew, are sent again."""
        latest = self._number, self._loading
        is_fed = isinstance(request, StepRequest) and (request.fed, loading) == latest
        return self.members if is_fed else frozenset()

    def _send(self, number: int, feeds: Mapping[str, Feeds]) -> None:
        with suppress(HetpipeError):  # a host is lost; the mini-batch under way says so
            for member, leaves in feeds.items():
                self._send_to(member, Feed(number, leaves))
