"""Connects workers of two hosts that share memory, such as two environments of one machine.

The sending worker dials the receiver's host, as for a stream, so both have proved that they know
the secret. Over this connection it says where the memory of a ring is; the ring's signals follow.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe.cluster.topology import Link
from hetpipe.errors import WorkerError
from hetpipe.memory import anonymous_file
from hetpipe.sdk.backend import Device
from hetpipe.wire.sharedmemory import Ring, RingInlet, RingOutlet, RingPort
from hetpipe.wire.stream import Arrival, PlainStream, StreamPort, prepare
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port
from hetpipe.wire.wire import Kind, Wire

_PLACE = struct.Struct("<ii")  # the sender's process, and its descriptor of the memory


@dataclass(frozen=True)
class NearPort(Port):
    """One end of a wire between hosts that share memory; `stream` says how they connect."""

    stream: StreamPort

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        sock, ring = self.stream.dial(), RingPort.of(wire, direct=False)
        prepare(sock)
        memory = anonymous_file(ring.nbytes)
        sock.sendall(_PLACE.pack(os.getpid(), memory))
        ends = Ring(ring, wire, device, [os.dup(memory), sock.detach()])
        return _NearOutlet(ends, wire, device, link, memory)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        return _NearInlet(Arrival(fds[0]), wire, device)


def _has_ended(process: int) -> bool:
    """Return whether a process has no memory any more. While it ends, the system refuses its files
    as files of root."""
    try:
        return Path(f"/proc/{process}/statm").read_text().startswith("0 ")
    except OSError:
        return True


class _NearOutlet(RingOutlet):
    """Keeps the memory's descriptor, through which the receiver opens the memory."""

    def __init__(self, ring: Ring, wire: Wire, device: Device, link: Link, memory: int) -> None:
        super().__init__(ring, wire, device, link)
        self._memory = open(memory, "rb")  # noqa: SIM115 - closed with this end

    def close(self) -> None:
        super().close()
        self._memory.close()


class _NearInlet(Inlet):
    """Opens the ring when the first message is due, as the sender may not be there before."""

    buffered = True

    def __init__(self, arrival: Arrival, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._arrival = arrival
        self._inlet: RingInlet | None = None

    def _take(self, kind: Kind) -> tuple[list[Any], float]:
        if self._inlet is None:
            self._inlet = self._open()
        return self._inlet._take(kind)

    def _open(self) -> RingInlet:
        place = bytearray(_PLACE.size)
        try:
            sock = self._arrival.accept()
            prepare(sock)
            PlainStream(sock).receive_into(memoryview(place))
        except (OSError, EOFError) as error:
            raise EdgeClosedError(str(error)) from error
        process, descriptor = _PLACE.unpack(place)
        try:
            memory = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
        except OSError as error:
            sock.close()
            if isinstance(error, FileNotFoundError) or _has_ended(process):
                raise EdgeClosedError(f"process {process}, the sender, has ended") from error
            raise WorkerError(
                f"the system does not let this process open memory of process {process}, a worker "
                f'of another host of this machine: {error}; use transport="tcp"'
            ) from error
        port = RingPort.of(self.wire, direct=False)
        ring = Ring(port, self.wire, self.device, [memory, sock.detach()])
        return RingInlet(ring, self.wire, self.device)

    def _release(self) -> None:
        assert self._inlet is not None
        self._inlet._release()

    def close(self) -> None:
        self._arrival.close()
        if self._inlet is not None:
            self._inlet.close()
