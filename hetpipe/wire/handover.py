"""Connects threads of one process: they hand over copies on the host, or a device's own buffers."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.sdk.backend import Device
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port, Tensor
from hetpipe.wire.wire import Kind, Wire, host_dtype

SLOTS = 4


def plugs(
    wire: Wire, ranks: tuple[int, int], tag: int, pieces: int, direct: bool
) -> tuple[tuple[HandoverPort, list[int]], tuple[HandoverPort, list[int]]]:
    """Return the sending and the receiving end of a wire, which are the same port."""
    port = HandoverPort()
    return (port, []), (port, [])


class HandoverPort(Port):
    """Both ends of a wire inside one process: a queue of messages, and a queue of free places."""

    def __init__(self) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()
        self.room: SimpleQueue[bool] = SimpleQueue()
        self.target: Device | None = None
        for _ in range(SLOTS):
            self.room.put(True)

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        return _HandoverOutlet(self, wire, device, link)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        self.target = device
        return _HandoverInlet(self, wire, device)

    def close(self) -> None:
        """Wake the threads that wait at both ends."""
        self.messages.put(None)
        self.room.put(False)


class _HandoverOutlet(Outlet):
    def __init__(self, port: HandoverPort, wire: Wire, device: Device, link: Link) -> None:
        super().__init__(wire, device, link)
        self._port = port

    @property
    def streams(self) -> bool:
        return super().streams and not self._shared()

    def _has_room(self) -> bool:
        return not self._port.room.empty()

    def _acquire(self, kind: Kind) -> list[Any]:
        if not self._port.room.get():
            raise EdgeClosedError
        if self._shared():
            return []
        return [np.empty(s.shape, host_dtype(s.dtype)) for s in self.wire.layouts[kind]]

    def _fill(self, kind: Kind, tensors: Sequence[Tensor], arrays: list[Any]) -> None:
        if self._shared():
            arrays += tensors
        else:
            super()._fill(kind, tensors, arrays)

    def _shared(self) -> bool:
        """Return whether both ends use one device, so that its buffers need no copy."""
        return self._port.target is self.device

    def _commit(self, kind: Kind, arrays: list[Any], deliver_s: float) -> None:
        self._port.messages.put((arrays, deliver_s))

    def close(self) -> None:
        self._port.close()


class _HandoverInlet(Inlet):
    buffered = True

    def __init__(self, port: HandoverPort, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._port = port

    def _take(self, kind: Kind) -> tuple[list[Any], float]:
        message: tuple[list[Any], float] | None = self._port.messages.get()
        if message is None:
            raise EdgeClosedError
        return message

    def _release(self) -> None:
        self._port.room.put(True)

    def close(self) -> None:
        self._port.close()
