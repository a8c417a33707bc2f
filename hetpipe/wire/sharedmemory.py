"""Connects processes of one host by a ring in shared memory; each slot of the ring has a message.

Signals travel through a socket pair: a byte from the sender says that a slot is filled, and a byte
from the receiver says that a slot is free. The end of the stream says that the other end is gone.

Between two accelerators the receiver may open a window, memory of its device that the sender's
device can write. Then a slot only says that its message is in the window, at the same place.
"""

from __future__ import annotations

import mmap
import os
import socket
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.errors import BackendError
from hetpipe.memory import anonymous_file
from hetpipe.sdk.backend import Buffer, Device, Window
from hetpipe.sockets import socket_of, socket_pair
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port, Tensor, to_host
from hetpipe.wire.wire import Array, Kind, Layout, Wire, arrays_in, offsets

SMALL_NBYTES = 1 << 20


HANDLE_NBYTES = 4096
"""Bytes before the slots of a direct ring, for the length and the bytes of a window's handle."""

HOST, WINDOW, BOTH = 0, 1, 2
"""Where a message is. The first message of a window is in both, and the receiver compares them."""


class WindowWarning(UserWarning):
    """A device cannot open or reach a window, so messages pass through the host."""


@dataclass(frozen=True)
class RingPort(Port):
    """A port with two descriptors: the memory, and this end of the socket pair.

    In a `direct` ring the receiver may open a window.
    """

    slots: int
    slot_nbytes: int
    direct: bool

    @staticmethod
    def of(wire: Wire, direct: bool) -> RingPort:
        """Return the port of a new ring for the messages of a wire."""
        slot_nbytes = wire.packed_nbytes
        return RingPort(8 if slot_nbytes <= SMALL_NBYTES else 3, slot_nbytes, direct)

    @property
    def nbytes(self) -> int:
        """The size of the memory."""
        return self.begin + self.window_nbytes

    @property
    def begin(self) -> int:
        """The first byte of the slots."""
        return HANDLE_NBYTES if self.direct else 0

    @property
    def window_nbytes(self) -> int:
        return self.slots * self.slot_nbytes

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        return RingOutlet(Ring(self, wire, device, fds), wire, device, link)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        return RingInlet(Ring(self, wire, device, fds), wire, device)


def plugs(
    wire: Wire, ranks: tuple[int, int], tag: int, pieces: int, direct: bool
) -> tuple[tuple[RingPort, list[int]], tuple[RingPort, list[int]]]:
    """Return the sending and the receiving end of a new ring, each with its descriptors."""
    port = RingPort.of(wire, direct)
    memory = anonymous_file(port.nbytes)
    left, right = socket_pair()
    return (port, [memory, left.detach()]), (port, [os.dup(memory), right.detach()])


class Ring:
    """One end of a ring: its slots in turn, and signals to and from the other end."""

    def __init__(self, port: RingPort, wire: Wire, device: Device, fds: Sequence[int]) -> None:
        memory = mmap.mmap(fds[0], port.nbytes)
        os.close(fds[0])
        self._unpin = device.pin(np.frombuffer(memory, np.uint8))
        self._socket = socket_of(fds[1])
        bases = [port.begin + slot * port.slot_nbytes for slot in range(port.slots)]
        self._arrays: list[dict[Kind, list[Array]]] = [
            {kind: arrays_in(memory, layout, base) for kind, layout in wire.layouts.items()}
            for base in bases
        ]
        self._deliver_s = [np.ndarray((), np.float64, memory, base) for base in bases]
        self._places = [np.ndarray((), np.int64, memory, base + 8) for base in bases]
        self.port = port
        self._memory = memory
        self.signals = 0
        self._turn = 0

    @property
    def handle(self) -> bytes:
        """The handle of the receiver's window; empty if there is none."""
        length = int(np.ndarray((), np.int64, self._memory))
        return bytes(self._memory[8 : 8 + length])

    def start(self, handle: bytes) -> None:
        """Leave the handle of a window for the sender, and signal that all slots are free."""
        if len(handle) > HANDLE_NBYTES - 8:
            raise BackendError(
                f"the handle of a window has {len(handle)} bytes, and at most {HANDLE_NBYTES - 8} "
                "have room: return a shorter handle from open_window"
            )
        self._memory[8 : 8 + len(handle)] = handle
        np.ndarray((), np.int64, self._memory)[()] = len(handle)
        self._send(self.port.slots)

    def wait(self) -> None:
        """Consume one signal from the other end; blocks until a signal comes."""
        self.signalled(flags=0)
        self.signals -= 1

    def signalled(self, flags: int = socket.MSG_DONTWAIT) -> bool:
        """Return whether there is a signal, so that `wait` would return at once."""
        if self.signals == 0:
            try:
                self.signals = len(self._socket.recv(64, flags))
            except OSError as error:
                if isinstance(error, BlockingIOError) and flags & socket.MSG_DONTWAIT:
                    return False
                raise EdgeClosedError from error
            if self.signals == 0:
                raise EdgeClosedError
        return True

    def slot(self, kind: Kind) -> tuple[list[Array], Array]:
        """Return the present slot: its tensors and its time of delivery."""
        return self._arrays[self._turn][kind], self._deliver_s[self._turn]

    def signal(self) -> None:
        """Signal that this end is done with the present slot."""
        self._turn = (self._turn + 1) % self.port.slots
        self._send(1)

    def _send(self, signals: int) -> None:
        try:
            self._socket.sendall(b"\1" * signals)
        except OSError as error:
            raise EdgeClosedError from error

    @property
    def place(self) -> Array:
        """Where the message of the present slot is."""
        return self._places[self._turn]

    def offsets(self, layout: Layout) -> list[int]:
        """Return where the tensors of the present slot begin in the window."""
        base = self._turn * self.port.slot_nbytes
        return [base + offset for offset in offsets(layout)[:-1]]

    def close(self) -> None:
        """Wake the thread that waits here, and the other end."""
        with suppress(OSError):  # the other end has closed the connection already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._unpin()


class RingOutlet(Outlet):
    """The sending end of a ring."""

    def __init__(self, ring: Ring, wire: Wire, device: Device, link: Link) -> None:
        super().__init__(wire, device, link)
        self._ring = ring
        self._window: Window | None = None
        self._is_checked = False
        self._knows_window = not ring.port.direct
        if not ring.port.direct:
            ring.signals = ring.port.slots  # all slots are free

    def _has_room(self) -> bool:
        return self._ring.signalled()

    def _acquire(self, kind: Kind) -> list[Array]:
        self._ring.wait()
        if not self._knows_window:  # the receiver wrote the handle before its first signal
            self._knows_window, self._window = True, self._map_window()
        self._ring.place[()] = HOST
        return self._ring.slot(kind)[0]

    def _map_window(self) -> Window | None:
        ring = self._ring
        if not ring.handle:
            return None
        try:
            return self.device.map_window(ring.handle, ring.port.window_nbytes)
        except BackendError as error:
            _warn(self.wire, self.device, error)
            return None

    def _fill(self, kind: Kind, tensors: Sequence[Tensor], arrays: list[Array]) -> None:
        buffers = [tensor for tensor in tensors if isinstance(tensor, Buffer)]
        whole = len(buffers) == len(tensors) and not kind.content.stays_on_host
        if self._window is None or not whole:
            super()._fill(kind, tensors, arrays)
            return
        begins = self._ring.offsets(self.wire.layouts[kind])
        events = [self._window.write(*pair) for pair in zip(buffers, begins, strict=True)]
        if not self._is_checked:
            super()._fill(kind, tensors, arrays)
        for event in events:
            event.wait()
        self._ring.place[()] = WINDOW if self._is_checked else BOTH
        self._is_checked = True

    def _commit(self, kind: Kind, arrays: list[Array], deliver_s: float) -> None:
        self._ring.slot(kind)[1][()] = deliver_s
        self._ring.signal()

    def close(self) -> None:
        self._ring.close()


class RingInlet(Inlet):
    """The receiving end of a ring."""

    buffered = True

    def __init__(self, ring: Ring, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._ring = ring
        self._window: Window | None = None
        if ring.port.direct:
            self._window, handle = self._open_window() or (None, b"")
            ring.start(handle)

    def _open_window(self) -> tuple[Window, bytes] | None:
        try:
            return self.device.open_window(self._ring.port.window_nbytes)
        except BackendError as error:
            _warn(self.wire, self.device, error)
            return None

    def _take(self, kind: Kind) -> tuple[list[Any], float]:
        self._ring.wait()
        arrays, deliver_s = self._ring.slot(kind)
        if self._ring.place == HOST or self._window is None:
            return arrays, float(deliver_s)
        layout = self.wire.layouts[kind]
        copies = [
            self._window.read(begin, slot.shape, slot.dtype)
            for begin, slot in zip(self._ring.offsets(layout), layout, strict=True)
        ]
        for _, event in copies:
            event.wait()
        buffers = [buffer for buffer, _ in copies]
        if self._ring.place == BOTH:
            self._compare(buffers, arrays)
        return buffers, float(deliver_s)

    def _compare(self, buffers: Sequence[Buffer], arrays: Sequence[Array]) -> None:
        """Raise `BackendError` if a message in the window has other bytes than on the host."""
        found = [np.empty_like(array) for array in arrays]
        to_host(self.device, buffers, found)
        for number, (one, other) in enumerate(zip(found, arrays, strict=True)):
            wrong = np.count_nonzero(_bytes(one) != _bytes(other))
            if wrong:
                raise BackendError(
                    f"{self.device.info.id}: {wrong} of {one.nbytes} bytes of tensor {number} from "
                    f"stage {self.wire.source.stage} are wrong after a copy from device to device; "
                    "turn off direct copies between the devices, and report this to their vendor"
                )

    def _release(self) -> None:
        self._ring.signal()

    def close(self) -> None:
        self._ring.close()


def _warn(wire: Wire, device: Device, error: BackendError) -> None:
    stages = f"from stage {wire.source.stage} to stage {wire.target.stage}"
    warnings.warn(
        f"{device.info.id}: messages {stages} pass through the host, with two copies instead of "
        f"one: {error}",
        WindowWarning,
        stacklevel=4,
    )


def _bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
