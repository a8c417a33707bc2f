"""Connects workers on different hosts by a TCP stream for each wire, encrypted if asked for.

The sending worker dials the port of the receiver's host, and both prove that they know the secret
(`hetpipe.hosts.door`). Both ends know the layout of every message, so no description travels.
"""

from __future__ import annotations

import fcntl
import math
import socket
import struct
import termios
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.errors import ClusterError
from hetpipe.hosts.door import Call, dial
from hetpipe.hosts.facts import own_facts
from hetpipe.hosts.meeting import WIRE
from hetpipe.hosts.tls import RefusedError, TlsStream, shut
from hetpipe.sdk.backend import Device
from hetpipe.sockets import socket_of
from hetpipe.wire.channel import ALIGN
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port
from hetpipe.wire.wire import Array, Kind, Wire, arrays_in, packed_nbytes

_TIME_NBYTES = 8
SMALL_NBYTES = 32 * 1024
"""Wires with messages up to this size need no threads: the system keeps their messages."""
ROOM_NBYTES = 8 * SMALL_NBYTES
"""Bytes of small messages that may be under way; the system keeps twice as many."""
KEEP_ALIVE = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
}
"""A receiver fails after 5 s of silence of the sender's host. The controller does not see a cut
between two other hosts."""


@dataclass(frozen=True)
class StreamPort(Port):
    """One end of a wire between hosts.

    `address` is the port of the receiver's host, for the sending end. `ahead_s` is how far the
    receiver's clock is ahead of the sender's. The receiving end has a descriptor, on which the
    accepted connection comes.
    """

    wire: str
    secret: bytes = field(repr=False)
    encrypted: bool
    address: tuple[str, int] | None
    ahead_s: float

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        return _StreamOutlet(self, self.dial(), wire, device, link)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        return _StreamInlet(self, fds[0], wire, device)

    def dial(self) -> socket.socket:
        """Connect to the receiver's host. Raises `EdgeClosedError`."""
        assert self.address is not None
        try:
            stream, _ = dial(self.address, self.secret, own_facts(), Call(WIRE, wire=self.wire))
            return stream.socket
        except (OSError, ClusterError) as error:
            place = f"{self.address[0]} port {self.address[1]}"
            raise EdgeClosedError(
                f"no connection to {place}: {error}; messages between hosts need this port "
                "(docs/hosts.md)"
            ) from error

    def secured(self, sock: socket.socket, *, server: bool) -> _Stream:
        prepare(sock)
        if self.encrypted:  # the handshake is part of the first message, which may take any time
            return TlsStream(sock, self.secret, server=server, limit_s=math.inf)
        return PlainStream(sock)


def prepare(sock: socket.socket) -> None:
    """Let a connected socket send small messages at once, and notice a silent peer."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEP_ALIVE.items():
        sock.setsockopt(*option, value)


class Arrival:
    """The place where the sender's connection comes; `descriptor` gets its socket."""

    def __init__(self, descriptor: int) -> None:
        self._coming = socket_of(descriptor)
        self._awaited = False

    def accept(self) -> socket.socket:
        """Wait for the connection. Raises `OSError` or `EOFError` if it cannot come."""
        self._awaited = True
        with self._coming:
            _, fds, _, _ = socket.recv_fds(self._coming, 1, 1)
        if not fds:
            raise EOFError("the sender has not connected")
        return socket_of(fds[0])

    def close(self) -> None:
        """Wake the thread that waits here."""
        with suppress(OSError):
            self._coming.shutdown(socket.SHUT_RDWR)
        if not self._awaited:
            self._coming.close()


class _Stream(Protocol):
    def sendall(self, data: Any) -> None: ...

    def receive_into(self, view: memoryview) -> None: ...

    def close(self) -> None: ...


class PlainStream:
    """A stream without encryption."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def sendall(self, data: Any) -> None:
        self._socket.sendall(data)

    def receive_into(self, view: memoryview) -> None:
        while view:
            try:
                got = self._socket.recv_into(view)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not got:
                raise EOFError("the other end closed the connection")
            view = view[got:]

    def close(self) -> None:
        shut(self._socket)


def is_small(wire: Wire) -> bool:
    """Return whether the system keeps some messages of a wire, so that a thread would only cost
    time."""
    return wire.packed_nbytes <= SMALL_NBYTES


class _Staging:
    """Host memory for one message: the same memory as bytes and, per kind, as arrays.

    The tensors travel first, as they may leave in pieces, and then the time of delivery.
    """

    def __init__(self, wire: Wire) -> None:
        flat = np.zeros(wire.packed_nbytes + _TIME_NBYTES, np.uint8)
        self.bytes = memoryview(flat.data)
        self.arrays = {kind: arrays_in(flat.data, lay) for kind, lay in wire.layouts.items()}
        ends = {kind: packed_nbytes(lay) for kind, lay in wire.layouts.items()}
        self.deliver_s = {n: np.ndarray((), np.float64, flat.data, end) for n, end in ends.items()}
        self.ends = {kind: end + _TIME_NBYTES for kind, end in ends.items()}


class _StreamOutlet(Outlet):
    def __init__(
        self, port: StreamPort, sock: socket.socket, wire: Wire, device: Device, link: Link
    ) -> None:
        super().__init__(wire, device, link)
        self._port, self._socket, self._staging = port, sock, _Staging(wire)
        self._stream: _Stream | None = None
        self._sent = 0  # where the bytes of the present message that have not left begin
        self._small = is_small(wire)
        if self._small:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * ROOM_NBYTES)

    def _has_room(self) -> bool:
        """Return whether the system takes a small message at once.

        The first message waits for the receiver.
        """
        if not self._small or self._stream is None:
            return False
        try:
            waiting = fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4))
        except (OSError, ValueError) as error:
            raise EdgeClosedError(str(error)) from error
        nbytes: int = struct.unpack("i", waiting)[0]
        return nbytes + 2 * SMALL_NBYTES <= ROOM_NBYTES

    def _acquire(self, kind: Kind) -> list[Array]:
        self._sent = ALIGN
        return self._staging.arrays[kind]

    def _filled(self, kind: Kind, nbytes: int) -> None:
        self._send(nbytes)

    def _commit(self, kind: Kind, arrays: list[Array], deliver_s: float) -> None:
        self._staging.deliver_s[kind][()] = deliver_s
        self._send(self._staging.ends[kind])

    def _send(self, end: int) -> None:
        try:
            if self._stream is None:
                self._stream = self._port.secured(self._socket, server=False)
            self._stream.sendall(self._staging.bytes[self._sent : end])
        except (OSError, RefusedError) as error:
            raise EdgeClosedError(str(error)) from error
        self._sent = end

    def close(self) -> None:
        shut(self._socket)


class _StreamInlet(Inlet):
    def __init__(self, port: StreamPort, descriptor: int, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self.buffered = is_small(wire)
        self._port, self._staging = port, _Staging(wire)
        self._arrival = Arrival(descriptor)
        self._stream: _Stream | None = None

    def _take(self, kind: Kind) -> tuple[list[Array], float]:
        staging = self._staging
        try:
            stream = self._stream or self._accept()
            stream.receive_into(staging.bytes[ALIGN : staging.ends[kind]])
        except (OSError, EOFError, RefusedError) as error:
            raise EdgeClosedError(str(error)) from error
        sent_s = float(staging.deliver_s[kind])
        return staging.arrays[kind], sent_s + self._port.ahead_s if sent_s else 0.0

    def _accept(self) -> _Stream:
        """Wait for the sender's connection."""
        self._stream = self._port.secured(self._arrival.accept(), server=True)
        return self._stream

    def _release(self) -> None:
        """Do nothing: the next receive reuses the staging memory."""

    def close(self) -> None:
        self._arrival.close()
        if self._stream is not None:
            self._stream.close()
