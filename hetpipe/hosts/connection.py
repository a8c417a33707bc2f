"""Messages between two hosts, with signs of life in both directions.

A message goes to a worker, or to the other process itself. A large message travels in pieces, so a
sign of life is never behind a gigabyte.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from hetpipe.hosts.guard import guard_connection
from hetpipe.hosts.pulse import has_answered, lost_way
from hetpipe.hosts.tls import TlsStream
from hetpipe.hosts.uninterrupted import call_uninterrupted
from hetpipe.packing import Packed, pack

PIECE_NBYTES = 256 * 1024
BEAT_S = 0.5
SILENCE_S = 3.5
"""Seconds without a sign of life from the other host's system after which it counts as lost."""
STUCK_S = 30.0
"""Seconds until the other process counts as stuck; a script may keep the interpreter's lock for
seconds, and a process that is stopped has a guard (`hetpipe.hosts.guard`)."""
ROUND_TRIPS = 64
"""The latest signs of life that tell how far the other host's clock is ahead."""
DRIFT = 5e-4
"""Most seconds by which two clocks move apart in a second: Linux corrects a clock no faster."""

_RECORD = struct.Struct("<BIQ")  # kind, number of the message, bytes that follow
_HEAD = struct.Struct("<iiI")  # crew, worker, number of parts; the parts' sizes follow
_TIMES = struct.Struct("<dd")
HEAD, BODY, PING, PONG = range(4)


class Address(NamedTuple):
    """The receiver of a message on a host: a worker of a crew. The host itself has worker -1."""

    crew: int
    worker: int


@dataclass(frozen=True)
class Clock:
    """How far the other host's clock is ahead of ours, in seconds, and the greatest error of it."""

    ahead_s: float
    error_s: float


class Clocks:
    """Compares this host's clock with another host's, by the latest round trips."""

    def __init__(self) -> None:
        self._trips: deque[_Trip] = deque(maxlen=ROUND_TRIPS)
        self._best: _Trip | None = None

    def add(self, sent_s: float, answered_s: float, now_s: float) -> None:
        """Record a round trip, which ends now; the other host answered by its own clock."""
        half_s = (now_s - sent_s) / 2
        self._trips.append(_Trip(half_s - DRIFT * now_s, answered_s - sent_s - half_s))
        self._best = min(self._trips)

    def at(self, now_s: float) -> Clock:
        """Return the difference by the round trip whose error is least now."""
        if self._best is None:
            return Clock(0.0, float("inf"))
        return Clock(self._best.ahead_s, self._best.error_s + DRIFT * now_s)

    @property
    def known(self) -> bool:
        """Whether a round trip has ended."""
        return self._best is not None


class _Trip(NamedTuple):
    """A round trip. `error_s` is its error at time 0; it grows by `DRIFT` in each second."""

    error_s: float
    ahead_s: float


class Connection:
    """One end of a connection between two hosts. Any thread may send.

    A thread calls `on_message` for each message, in order, and at last `on_end`, once, with the
    reason. `peer` names the other host in reasons.
    """

    def __init__(self, stream: TlsStream, peer: str, silence_s: float = SILENCE_S) -> None:
        self.peer = peer
        self._stream = stream
        self._silence_s = silence_s
        guard_connection(stream.socket)
        self._numbers = itertools.count(1)
        self._heard = True  # whether bytes have come since the last beat
        self._clocks = Clocks()
        self._closed = False
        self._expects_end = False  # whether nobody has to be told of the end
        # Held while the first reason is noted; never while `on_end` runs.
        self._ending = threading.Lock()
        self._reason = ""
        _prepare(stream.socket)

    def start(
        self, on_message: Callable[[Address, Packed], None], on_end: Callable[[str], None]
    ) -> None:
        """Begin to receive."""
        self._on_message, self._on_end = on_message, on_end
        for run, name in ((self._receive, "receive"), (self._beat, "beat")):
            threading.Thread(target=run, name=f"hetpipe {name} {self.peer}", daemon=True).start()

    @property
    def clock(self) -> Clock:
        """The difference of the clocks now."""
        return self._clocks.at(time.monotonic())

    def send(self, address: Address, message: Any) -> None:
        """Send a picklable object, or a packed one. Raises `OSError`.

        An interrupt is raised when the message has left, because half a message, or half a record
        of TLS, would make the connection useless.
        """
        parts = pack(message).parts
        call_uninterrupted(lambda: self._send(address, parts))

    def _send(self, address: Address, parts: Sequence[Any]) -> None:
        number = next(self._numbers) & 0xFFFFFFFF
        sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
        head = _HEAD.pack(*address, len(parts)) + sizes
        record = _RECORD.pack(HEAD, number, len(head)) + head
        nbytes = sum(len(part) for part in parts)
        if nbytes <= PIECE_NBYTES:
            body = b"".join(parts)
            self._stream.sendall(b"".join((record, _RECORD.pack(BODY, number, nbytes), body)))
            return
        self._stream.sendall(record)
        for piece in _pieces(parts):
            self._stream.sendall(b"".join((_RECORD.pack(BODY, number, len(piece)), piece)))

    def expect_end(self) -> None:
        """Do not call `on_end` any more. A silent or stuck host is still cut off, which frees the
        threads that send."""
        self._expects_end = True

    def close(self) -> None:
        """End the connection; `on_end` is not called."""
        self._expects_end = self._closed = True
        self._stream.close()

    def _end(self, reason: str) -> None:
        with self._ending:
            if self._reason or self._closed:
                return
            self._reason = reason
        self._stream.close()
        if not self._expects_end:
            self._on_end(reason)

    def _receive(self) -> None:
        arriving: dict[int, _Arriving] = {}
        try:
            while True:
                kind, number, nbytes = _RECORD.unpack(self._stream.receive(_RECORD.size))
                self._heard = True
                if kind == HEAD:
                    arriving[number] = _Arriving(self._stream.receive(nbytes))
                elif kind == BODY:
                    message = arriving[number]
                    message.fill(self._stream, nbytes)
                    if message.is_whole:
                        del arriving[number]
                        self._on_message(message.address, Packed(message.parts))
                else:
                    self._time(kind, _TIMES.unpack(self._stream.receive(nbytes)))
                self._heard = True
        except EOFError as error:
            self._end(f"{error}: its process has ended, or is stopped")
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}")

    def _time(self, kind: int, times_s: tuple[float, float]) -> None:
        now_s = time.monotonic()
        sent_s, answered_s = times_s
        if kind == PING:
            self._signal(PONG, sent_s, now_s)
            return
        self._clocks.add(sent_s, answered_s, now_s)

    def _signal(self, kind: int, *times_s: float) -> None:
        """Send a sign of life, unless a message is leaving, which is a sign as well.

        A thread that waited here would not read, and two hosts that both send would wait for ever.
        """
        with suppress(OSError, ValueError):  # the receiving thread says why
            self._stream.send_if_free(_RECORD.pack(kind, 0, _TIMES.size) + _TIMES.pack(*times_s))

    def _beat(self) -> None:
        """Send signs of life, and end the connection if none comes.

        A wait counts with twice its length at most, since this process may be stopped meanwhile, or
        the machine may sleep.
        """
        silent_s = stuck_s = 0.0
        while not (self._closed or self._reason):
            begin_s = time.monotonic()
            self._signal(PING, begin_s, 0.0)
            wait_s = BEAT_S if self._clocks.known else BEAT_S / 10
            time.sleep(wait_s)
            took_s = time.monotonic() - begin_s
            counted_s = min(took_s, 2 * wait_s)
            stuck_s = 0.0 if self._heard else stuck_s + counted_s
            self._heard = False
            silent_s += counted_s
            if has_answered(self._stream.socket, took_s):
                silent_s = 0.0
            if silent_s >= self._silence_s:
                why = lost_way(self._stream.socket)
                self._end(why or f"it has given no sign of life for {self._silence_s:g} s")
            elif stuck_s >= STUCK_S:
                self._end(f"it has not answered for {stuck_s:.0f} s: it is stuck")


class _Arriving:
    """A message whose parts are arriving."""

    def __init__(self, head: bytearray) -> None:
        crew, worker, count = _HEAD.unpack_from(head)
        self.address = Address(crew, worker)
        sizes = struct.unpack_from(f"<{count}Q", head, _HEAD.size)
        self.parts = [memoryview(bytearray(size)) for size in sizes]
        self._empty = [part for part in self.parts if part]  # views of the bytes that are missing

    def fill(self, stream: TlsStream, nbytes: int) -> None:
        while nbytes:
            view = self._empty[0][:nbytes]
            stream.receive_into(view)
            nbytes -= len(view)
            self._empty[0] = self._empty[0][len(view) :]
            if not self._empty[0]:
                del self._empty[0]

    @property
    def is_whole(self) -> bool:
        return not self._empty


def _pieces(parts: Sequence[Any]) -> Iterator[memoryview]:
    """Yield the bytes of all parts in pieces."""
    for part in parts:
        view = memoryview(part)
        for begin in range(0, len(view), PIECE_NBYTES):
            yield view[begin : begin + PIECE_NBYTES]


def _prepare(sock: socket.socket) -> None:
    """Let a socket wait without a limit, and send small messages at once."""
    sock.settimeout(None)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
