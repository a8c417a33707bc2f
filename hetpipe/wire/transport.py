"""Outlet and inlet: the two ends of a wire, opened from ports that are sent to workers (station 9
of docs/life-of-a-micro-batch.md).

A message is a list of tensors whose shapes both ends know. Only one thread at a time uses an end.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.sdk.host.validation import upload
from hetpipe.wire.wire import (
    Array,
    Kind,
    Piece,
    Wire,
    offsets,
    streams,
)

Tensor = Buffer | Array


class EdgeClosedError(Exception):
    """The other end of a wire is gone."""


class EmulatedLink:
    """Delays a sender as long as a slower link would, and computes when the message arrives."""

    def __init__(self, link: Link) -> None:
        self.latency_s = link.latency_s or 0.0
        self._bandwidth_Bps = link.bandwidth_Bps
        self.emulates = link.latency_s is not None or link.bandwidth_Bps is not None

    def occupy(self, start_s: float, nbytes: int) -> float:
        """Wait until the link is free again. Return the time of delivery; 0 means at once."""
        if not self.emulates:
            return 0.0
        transfer_s = nbytes / self._bandwidth_Bps if self._bandwidth_Bps else 0.0
        sleep_until(start_s + transfer_s)
        return start_s + transfer_s + self.latency_s


def sleep_until(time_s: float) -> None:
    """Sleep until `time.monotonic()` reaches `time_s`; return at once for a past time."""
    if time_s and (rest_s := time_s - time.monotonic()) > 0:
        time.sleep(rest_s)


class Outlet(ABC):
    """The sending end of a wire."""

    def __init__(self, wire: Wire, device: Device, link: Link) -> None:
        self.wire = wire
        self.device = device
        self.link = EmulatedLink(link)
        self._on_cores = device.info.on_cores
        self._nbytes = {kind: sum(s.nbytes for s in lay) for kind, lay in wire.layouts.items()}

    def send(self, kind: Kind, tensors: Sequence[Tensor]) -> tuple[float, float]:
        """Send one message of this kind; blocks while there is no room. Return when the transfer
        began and ended. Raises `EdgeClosedError` if nobody can receive the message."""
        arrays = self._acquire(kind)
        start_s = time.monotonic()
        self._fill(kind, tensors, arrays)
        self._commit(kind, arrays, self.link.occupy(start_s, self._nbytes[kind]))
        return start_s, time.monotonic()

    @property
    def streams(self) -> bool:
        """Whether messages can leave in pieces."""
        return streams(self.device.info)

    def stream(self, kind: Kind, pieces: Sequence[Piece]) -> tuple[float, float]:
        """Send one message of this kind in pieces, each when it becomes ready.

        The pieces make up the whole message, in order. Return when the first piece was ready, and
        when the transfer ended. Raises `EdgeClosedError` if nobody can receive the message.
        """
        arrays = self._acquire(kind)
        begins = offsets(self.wire.layouts[kind])
        started_s: list[float] = []
        free_s = deliver_s = 0.0
        for piece in pieces:
            # If a piece was ready while the previous one travelled, it follows without a gap.
            follows = free_s > 0.0 and piece.ready.done()
            piece.ready.wait()
            begin_s = free_s if follows else time.monotonic()
            started_s.append(begin_s)
            room = arrays[piece.tensor].reshape(-1)[piece.lo : piece.hi]
            self.device.download_part(piece.buffer, piece.lo, piece.hi, room).wait()
            self._filled(kind, begins[piece.tensor] + piece.hi * room.itemsize)
            deliver_s = self.link.occupy(begin_s, room.nbytes)
            free_s = deliver_s - self.link.latency_s if deliver_s else 0.0
        self._commit(kind, arrays, deliver_s)
        return min(started_s, default=time.monotonic()), time.monotonic()

    def immediate(self) -> bool:
        """Return whether a message would leave now, by a copy in host memory and without a wait.
        Raises `EdgeClosedError` if nobody can receive the message."""
        return not self.link.emulates and self._on_cores and self._has_room()

    def _has_room(self) -> bool:
        """Return whether `_acquire` would return at once; False if that is unknown."""
        return False

    @abstractmethod
    def _acquire(self, kind: Kind) -> list[Array]:
        """Return host arrays for the next message; blocks until there is room."""

    def _fill(self, kind: Kind, tensors: Sequence[Tensor], arrays: list[Array]) -> None:
        to_host(self.device, tensors, arrays)

    def _filled(self, kind: Kind, nbytes: int) -> None:  # noqa: B027 - memory needs no call
        """Note that the first `nbytes` of the message are filled; a transport may send them now."""

    @abstractmethod
    def _commit(self, kind: Kind, arrays: list[Array], deliver_s: float) -> None:
        """Hand over the filled arrays."""

    @abstractmethod
    def close(self) -> None:
        """Release this end; the other end notices it."""


class Inlet(ABC):
    """The receiving end of a wire."""

    buffered = False
    """Whether messages arrive even while no thread waits for them."""

    def __init__(self, wire: Wire, device: Device) -> None:
        self.wire = wire
        self.device = device
        self.on_cores = device.info.on_cores

    def receive(self, kind: Kind) -> tuple[list[Any], float]:
        """Return the next message, which is of this kind, and the time when the message arrived.

        Whole activations and their gradients are returned on the device, other tensors on the host.
        Raises `EdgeClosedError` if no message can come.
        """
        arrays, deliver_s = self._take(kind)
        sleep_until(deliver_s)
        start_s = time.monotonic()
        if kind.content.stays_on_host:
            tensors: list[Any] = [array.copy() for array in arrays]
        else:
            tensors = to_device(self.device, arrays)
        self._release()
        return tensors, start_s

    @abstractmethod
    def _take(self, kind: Kind) -> tuple[list[Any], float]:
        """Return the arrays of the next message and its time of delivery; blocks."""

    @abstractmethod
    def _release(self) -> None:
        """Give back the arrays after they have been read."""

    @abstractmethod
    def close(self) -> None:
        """Release this end; the other end notices it."""


class Port(ABC):
    """One end of a wire before it is opened. Between processes it is pickled, without `fds`."""

    @abstractmethod
    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        """Open the port as the sending end."""

    @abstractmethod
    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        """Open the port as the receiving end."""


def to_host(device: Device, tensors: Sequence[Tensor], arrays: Sequence[Array]) -> None:
    """Copy buffers (or host arrays) into host arrays."""
    events = []
    for tensor, array in zip(tensors, arrays, strict=True):
        if isinstance(tensor, np.ndarray):
            np.copyto(array, tensor)
        else:
            events.append(device.download(tensor, array))
    for event in events:
        event.wait()


def to_device(device: Device, arrays: Sequence[Any]) -> list[Buffer]:
    """Copy host arrays to the device. Entries that are the device's buffers stay unchanged."""
    buffers, events = [], []
    for array in arrays:
        if isinstance(array, np.ndarray):
            array, event = upload(device, array)
            events.append(event)
        buffers.append(array)
    for event in events:
        event.wait()
    return buffers
