"""The edges of a worker: senders and receivers of messages, on extra threads where that is faster
(stations 6 and 8 of docs/life-of-a-micro-batch.md)."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from hetpipe.schedule.action import Action
from hetpipe.sdk.backend import Device
from hetpipe.wire.ends import EdgeEnd
from hetpipe.wire.handover import HandoverPort
from hetpipe.wire.shares import Replica
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Tensor
from hetpipe.wire.wire import Axes, Kind, Layout, Piece

AHEAD = 2
"""Number of received messages that may wait on the device for the compute thread."""

LOOK_S = 0.5
"""Seconds between two checks whether the sender's thread lives, while `drain` waits for it."""

Edge = tuple[Replica, Replica]
"""Source and target."""
Span = tuple[Action, float, float]
OnError = Callable[[BaseException], None]


class _Edge:
    """A worker's end of a wire; it collects the spans of the messages."""

    def __init__(self, end: Inlet | Outlet) -> None:
        self._wire = end.wire
        self._spans: list[Span] = []
        self.closing = False

    def layout(self, kind: Kind) -> Layout | None:
        """Return the layout of messages of this kind; None if no such message travels here."""
        return self._wire.layouts.get(kind)

    @property
    def axes(self) -> Axes:
        """The dimension of the rows of each tensor that travels by rows, by name."""
        return self._wire.axes

    def take_spans(self) -> list[Span]:
        """Return the spans of the messages sent or received since the last call."""
        spans, self._spans = self._spans, []
        return spans


class Sender(_Edge):
    """Sends messages in the order in which it gets them.

    If a message can leave without a wait, the calling thread copies it. The copy is cheaper than
    waking another thread, which would compete for the same core.
    """

    def __init__(self, outlet: Outlet, on_error: OnError) -> None:
        super().__init__(outlet)
        self._outlet, self._on_error = outlet, on_error
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._queued = self._sent = 0  # messages given to the thread; messages that it has sent
        self._thread = _start(self._run, on_error, f"send {outlet.wire.target}", self)

    def send(self, action: Action, kind: Kind, tensors: Sequence[Tensor]) -> None:
        """Send the message of an action. The tensors must not change until the message has left."""
        try:
            if self._queued == self._sent and self._outlet.immediate():
                self._spans.append((action, *self._outlet.send(kind, tensors)))
                return
        except EdgeClosedError as error:
            _report(error, self, self._on_error)
            raise
        self._put(action, partial(self._outlet.send, kind, tensors))

    @property
    def streams(self) -> bool:
        """Whether messages can leave in pieces."""
        return self._outlet.streams

    def stream(self, action: Action, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Send the message of an action in pieces, each when it is ready."""
        self._put(action, partial(self._outlet.stream, kind, pieces))

    def drain(self) -> None:
        """Wait until all messages are sent. Raises `EdgeClosedError` if the thread has ended."""
        sent = threading.Event()
        self._queue.put(sent)
        while not sent.wait(LOOK_S):
            if not self._thread.is_alive():
                raise EdgeClosedError

    def close(self) -> None:
        self.closing = True
        self._outlet.close()
        self._queue.put(None)

    def _put(self, action: Action, leave: Callable[[], tuple[float, float]]) -> None:
        self._queued += 1
        self._queue.put((action, leave))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            action, leave = item
            self._spans.append((action, *leave()))
            self._sent += 1


class Receiver(_Edge, ABC):
    """Receives messages in the order in which `expect` announces them, one message per action."""

    def __init__(self, inlet: Inlet) -> None:
        super().__init__(inlet)
        self._inlet = inlet
        self._box: dict[Action, list[Any]] = {}

    @abstractmethod
    def expect(self, order: Sequence[tuple[Action, Kind]]) -> None:
        """Announce the next messages: the receiving action and the kind of each message."""

    @abstractmethod
    def take(self, action: Action) -> list[Any]:
        """Return the tensors for a receiving action; blocks. Raises `EdgeClosedError` if closed."""

    def close(self) -> None:
        """Wake the thread that waits for a message."""
        self.closing = True
        self._inlet.close()

    def _receive(self, action: Action, kind: Kind) -> list[Any]:
        tensors, start_s = self._inlet.receive(kind)
        self._spans.append((action, start_s, time.monotonic()))
        return tensors


class DirectReceiver(Receiver):
    """Receives a message on the thread that takes it, so no other thread competes for the core."""

    def __init__(self, inlet: Inlet, on_error: OnError) -> None:
        super().__init__(inlet)
        self._on_error = on_error
        self._expected: deque[tuple[Action, Kind]] = deque()

    def expect(self, order: Sequence[tuple[Action, Kind]]) -> None:
        self._expected.extend(order)

    def take(self, action: Action) -> list[Any]:
        try:
            while action not in self._box:
                receiving, kind = self._expected.popleft()
                self._box[receiving] = self._receive(receiving, kind)
        except EdgeClosedError as error:
            _report(error, self, self._on_error)
            raise
        return self._box.pop(action)


class PrefetchingReceiver(Receiver):
    """Receives messages on an extra thread as they arrive, and keeps them until they are taken."""

    def __init__(self, inlet: Inlet, on_error: OnError) -> None:
        super().__init__(inlet)
        self._orders: SimpleQueue[Sequence[tuple[Action, Kind]] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._awaits = False
        self._thread = _start(self._run, on_error, f"receive {inlet.wire.source}", self)

    def expect(self, order: Sequence[tuple[Action, Kind]]) -> None:
        self._orders.put(order)

    def take(self, action: Action) -> list[Any]:
        with self._changed:
            self._awaits = True
            if len(self._box) >= AHEAD:
                self._changed.notify_all()
            while action not in self._box:
                if self.closing:
                    raise EdgeClosedError
                self._changed.wait()
            self._awaits = False
            tensors = self._box.pop(action)
            if len(self._box) == AHEAD - 1:
                self._changed.notify_all()
            return tensors

    def close(self) -> None:
        super().close()
        self._orders.put(None)
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            for action, kind in order:
                self._wait_for_room()
                tensors = self._receive(action, kind)
                with self._changed:
                    self._box[action] = tensors
                    self._changed.notify_all()

    def _wait_for_room(self) -> None:
        with self._changed:
            # With a full box, `take` may wait for a later message; then receive that message too.
            while len(self._box) >= AHEAD and not self._awaits and not self.closing:
                self._changed.wait()


def make_receiver(inlet: Inlet, on_error: OnError) -> Receiver:
    """Return the receiver of an edge; it is direct if messages only need a copy in host memory."""
    if inlet.buffered and inlet.on_cores:
        return DirectReceiver(inlet, on_error)
    return PrefetchingReceiver(inlet, on_error)


def open_edges(
    ends: Sequence[EdgeEnd],
    descriptors: Sequence[int],
    own: Collection[Replica],
    device: Device,
    on_error: Callable[[int, BaseException], None],
) -> tuple[dict[Edge, Sender], dict[Edge, Receiver]]:
    """Return the senders and receivers of a worker's replicas `own`, by edge.

    `on_error` gets the neighbour and the error of an edge. Raises `EdgeClosedError` if a neighbour
    cannot be reached.
    """
    senders: dict[Edge, Sender] = {}
    receivers: dict[Edge, Receiver] = {}
    for end in ends:
        wire, fds = end.wire, descriptors[slice(*end.fds)]
        edge, report = (wire.source, wire.target), partial(on_error, end.neighbour)
        port = end.port or HandoverPort()
        if wire.target in own:
            receivers[edge] = make_receiver(port.inlet(wire, device, fds), report)
        if wire.source in own:
            try:
                senders[edge] = Sender(port.outlet(wire, device, end.link, fds), report)
            except EdgeClosedError as error:
                report(error)
                raise
    return senders, receivers


def _report(error: BaseException, edge: Sender | Receiver, on_error: OnError) -> None:
    """Report a broken edge, unless this worker closed it."""
    if not edge.closing:
        on_error(error)


def _start(
    run: Callable[[], None], on_error: OnError, name: str, edge: Sender | Receiver
) -> threading.Thread:
    def guarded() -> None:
        try:
            run()
        except EdgeClosedError as error:
            _report(error, edge, on_error)
        except Exception as error:
            on_error(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
