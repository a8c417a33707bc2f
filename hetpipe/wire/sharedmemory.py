"""Connects processes of one host by a ring in shared memory; each slot of the ring has a message.

Signals travel through a socket pair: a byte from the sender says that a slot is filled, and a byte
from the receiver says that a slot is free. The end of the stream says that the other end is gone.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.sdk.backend import Device
from hetpipe.wire.channel import anonymous_file
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port
from hetpipe.wire.wire import Array, Kind, Wire, arrays_in

SMALL_NBYTES = 1 << 20


@dataclass(frozen=True)
class RingPort(Port):
    """A port with two descriptors: the memory, and this end of the socket pair."""

    slots: int
    slot_nbytes: int

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        return _RingOutlet(_Ring(self, wire, device, fds), wire, device, link)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        return _RingInlet(_Ring(self, wire, device, fds), wire, device)


def plugs(
    wire: Wire, ranks: tuple[int, int], tag: int, pieces: int
) -> tuple[tuple[RingPort, list[int]], tuple[RingPort, list[int]]]:
    """Return the sending and the receiving end of a new ring, each with its descriptors."""
    slot_nbytes = wire.packed_nbytes
    port = RingPort(8 if slot_nbytes <= SMALL_NBYTES else 3, slot_nbytes)
    memory = anonymous_file(port.slots * slot_nbytes)
    left, right = socket.socketpair()
    return (port, [memory, left.detach()]), (port, [os.dup(memory), right.detach()])


class _Ring:
    """One end of a ring: its slots in turn, and signals to and from the other end."""

    def __init__(self, port: RingPort, wire: Wire, device: Device, fds: Sequence[int]) -> None:
        memory = mmap.mmap(fds[0], port.slots * port.slot_nbytes)
        os.close(fds[0])
        self._unpin = device.pin(np.frombuffer(memory, np.uint8))
        self._socket = socket.socket(fileno=fds[1])
        bases = [slot * port.slot_nbytes for slot in range(port.slots)]
        self._arrays: list[dict[Kind, list[Array]]] = [
            {kind: arrays_in(memory, layout, base) for kind, layout in wire.layouts.items()}
            for base in bases
        ]
        self._deliver_s = [np.ndarray((), np.float64, memory, base) for base in bases]
        self.signals = 0
        self.slots = port.slots
        self._turn = 0

    def wait(self) -> None:
        """Consume one signal from the other end; blocks until a signal comes."""
        self.signalled(flags=0)
        self.signals -= 1

    def signalled(self, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Return whether there is a signal, so that `wait` would return at once."""
        if self.signals == 0:
            try:
                self.signals = len(self._socket.recv(64, flags))
            except BlockingIOError:
                return False
            except OSError as error:
                raise EdgeClosedError from error
            if self.signals == 0:
                raise EdgeClosedError
        return True

    def slot(self, kind: Kind) -> tuple[list[Array], Array]:
        """Return the present slot: its tensors and its time of delivery."""
        return self._arrays[self._turn][kind], self._deliver_s[self._turn]

    def signal(self) -> None:
        """Signal that this end is done with the present slot."""
        self._turn = (self._turn + 1) % self.slots
        try:
            self._socket.send(b"\1")
        except OSError as error:
            raise EdgeClosedError from error

    def close(self) -> None:
        """Wake the thread that waits here, and the other end."""
        with suppress(OSError):  # the other end has closed the connection already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._unpin()


class _RingOutlet(Outlet):
    def __init__(self, ring: _Ring, wire: Wire, device: Device, link: Link) -> None:
        super().__init__(wire, device, link)
        self._ring = ring
        ring.signals = ring.slots  # all slots are free

    def _has_room(self) -> bool:
        return self._ring.signalled()

    def _acquire(self, kind: Kind) -> list[Array]:
        self._ring.wait()
        return self._ring.slot(kind)[0]

    def _commit(self, kind: Kind, arrays: list[Array], deliver_s: float) -> None:
        self._ring.slot(kind)[1][()] = deliver_s
        self._ring.signal()

    def close(self) -> None:
        self._ring.close()


class _RingInlet(Inlet):
    buffered = True

    def __init__(self, ring: _Ring, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._ring = ring

    def _take(self, kind: Kind) -> tuple[list[Array], float]:
        self._ring.wait()
        arrays, deliver_s = self._ring.slot(kind)
        return arrays, float(deliver_s)

    def _release(self) -> None:
        self._ring.signal()

    def close(self) -> None:
        self._ring.close()
