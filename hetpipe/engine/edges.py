"""The threads at a worker's edges: one sends, one receives, while the compute thread computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from hetpipe.engine.pieces import Piece
from hetpipe.engine.transport import EdgeClosedError, Inlet, Outlet, Tensor
from hetpipe.engine.wiring import Axes, Kind, Layout
from hetpipe.schedule.action import Action

AHEAD = 2
"""Messages that may lie received on the device before the compute thread asks for them."""

GRACE_S = 2.0
"""How long a broken edge keeps silent: its cause, a dead neighbour, is told by the controller."""

LOOK_S = 0.5
"""How often who waits for a sender looks whether it still lives."""

Span = tuple[Action, float, float]
OnError = Callable[[BaseException], None]


class Sender:
    """Sends messages in the order in which it gets them.

    A message that leaves without waiting for anybody is copied by who sends it: on a processor that
    is cheaper than waking a thread, which would compete for the same core.
    """

    def __init__(self, outlet: Outlet, on_error: OnError) -> None:
        self._outlet = outlet
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._spans: list[Span] = []
        self._queued = self._sent = 0  # messages given to the thread, and those it is done with
        self._thread = _start(self._run, on_error, f"send {outlet.wire.target}", self)
        self.closing = False

    def layout(self, kind: Kind) -> Layout | None:
        """The tensors of a message of this kind; None if there are none and so no message."""
        return self._outlet.wire.layouts.get(kind)

    @property
    def axes(self) -> Axes:
        """Where the rows of tensors lie of which rows travel."""
        return self._outlet.wire.axes

    def send(self, action: Action, kind: Kind, tensors: Sequence[Tensor]) -> None:
        """Send a message for an action; buffers must stay unchanged until it has left."""
        if self._queued == self._sent and self._outlet.immediate():
            self._spans.append((action, *self._outlet.send(kind, tensors)))
        else:
            self._put(action, partial(self._outlet.send, kind, tensors))

    @property
    def streams(self) -> bool:
        """Whether messages can leave in pieces."""
        return self._outlet.streams

    def stream(self, action: Action, kind: Kind, pieces: Sequence[Piece]) -> None:
        """Send a message for an action in pieces, as they become ready."""
        self._put(action, partial(self._outlet.stream, kind, pieces))

    def drain(self) -> None:
        """Wait until everything is sent. Raises `EdgeClosedError` if the thread has ended."""
        sent = threading.Event()
        self._queue.put(sent)
        while not sent.wait(LOOK_S):
            if not self._thread.is_alive():
                raise EdgeClosedError

    def take_spans(self) -> list[Span]:
        """The spans of what was sent since the last time."""
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End the thread."""
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


class Receiver:
    """Receives the messages of a step as they come and keeps them until they are asked for."""

    def __init__(self, inlet: Inlet, on_error: OnError) -> None:
        self._inlet = inlet
        self._orders: SimpleQueue[Sequence[tuple[Action, Kind]] | None] = SimpleQueue()
        self._box: dict[Action, list[Any]] = {}
        self._changed = threading.Condition()
        self._wanted = False
        self._spans: list[Span] = []
        self._thread = _start(self._run, on_error, f"receive {inlet.wire.source}", self)
        self.closing = False

    def layout(self, kind: Kind) -> Layout | None:
        """The tensors of a message of this kind; None if there are none and so no message."""
        return self._inlet.wire.layouts.get(kind)

    @property
    def axes(self) -> Axes:
        """Where the rows of tensors lie of which rows travel."""
        return self._inlet.wire.axes

    def expect(self, order: Sequence[tuple[Action, Kind]]) -> None:
        """What the other end will send next: (receiving action, kind)."""
        self._orders.put(order)

    def take(self, action: Action) -> list[Any]:
        """The message for a receiving action; blocks. Raises `EdgeClosedError` when closed."""
        with self._changed:
            self._wanted = True
            if len(self._box) >= AHEAD:
                self._changed.notify_all()
            while action not in self._box:
                if self.closing:
                    raise EdgeClosedError
                self._changed.wait()
            self._wanted = False
            tensors = self._box.pop(action)
            if len(self._box) == AHEAD - 1:
                self._changed.notify_all()
            return tensors

    def take_spans(self) -> list[Span]:
        """The spans of what was received since the last time."""
        spans, self._spans = self._spans, []
        return spans

    def close(self) -> None:
        """End the thread and wake who waits in `take`."""
        self.closing = True
        self._inlet.close()
        self._orders.put(None)
        with self._changed:
            self._changed.notify_all()

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            for action, kind in order:
                self._wait_for_room()
                tensors, start_s = self._inlet.receive(kind)
                self._spans.append((action, start_s, time.monotonic()))
                with self._changed:
                    self._box[action] = tensors
                    self._changed.notify_all()

    def _wait_for_room(self) -> None:
        with self._changed:
            # Whoever waits for a message behind those in the box must get it, or nothing moves.
            while len(self._box) >= AHEAD and not self._wanted and not self.closing:
                self._changed.wait()


def _start(
    run: Callable[[], None], on_error: OnError, name: str, edge: Sender | Receiver
) -> threading.Thread:
    def guarded() -> None:
        try:
            run()
        except EdgeClosedError as error:
            if not edge.closing:
                time.sleep(GRACE_S)
                on_error(error)
        except Exception as error:
            on_error(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread
