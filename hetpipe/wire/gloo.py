"""Connects any processes by torch.distributed's gloo. A message travels as one flat tensor, or in
several parts.

Both ends know the kind of every message beforehand, so no description travels with it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from hetpipe.cluster.topology import Link
from hetpipe.sdk.backend import Device
from hetpipe.wire.channel import ALIGN, aligned
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet, Port
from hetpipe.wire.wire import Array, Kind, Wire, arrays_in, packed_nbytes

LOOPBACK = "127.0.0.1"
# A receive may wait while the training idles for hours. Failures are reported on another channel.
PATIENCE = timedelta(days=7)

LEAST_PART_NBYTES = 16 * 1024
"""Least bytes of a part; gloo moves this many in about the fixed time of a message."""


def plugs(
    wire: Wire, ranks: tuple[int, int], tag: int, pieces: int, direct: bool
) -> tuple[tuple[GlooPort, list[int]], tuple[GlooPort, list[int]]]:
    """Return the sending and the receiving end of a wire between two ranks."""
    return (GlooPort(ranks[1], tag, pieces), []), (GlooPort(ranks[0], tag, pieces), [])


def host() -> tuple[Any, tuple[str, int]]:
    """Start the store where processes meet; return the store and its address on the loopback.

    The store must outlive the processes.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    # If the store made the socket, it would listen on every interface.
    with socket.create_server((LOOPBACK, 0), backlog=socket.SOMAXCONN) as server:
        port = server.getsockname()[1]
        store = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False,
            master_listen_fd=os.dup(server.fileno()),
        )  # fmt: skip
    return store, (LOOPBACK, port)


def join(rank: int, world: int, address: tuple[str, int], limit_s: float) -> None:
    """Become `rank` of the process group; return when all ranks have joined."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in its __all__

    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=limit_s))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    if hasattr(os, "SCHED_BATCH"):
        _calm_gloo()


def _calm_gloo() -> None:
    """Keep gloo's thread from preempting ours on the core that they share.

    If gloo's thread wakes in the middle of a send, it spins on the sender's lock until its time
    slice ends: milliseconds each time. A batch thread waits its turn. If the system does not allow
    a batch thread, messages are only slower.
    """
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _group() -> Any:
    """Return the process group, for direct calls: `dist.isend` costs as much as a small message."""
    import torch.distributed as dist

    return dist.group.WORLD


@dataclass(frozen=True)
class GlooPort(Port):
    """One end of a wire; `peer` is the rank at the other end, `tag` names the wire.

    If `parts` is more than 1, a message's body travels in up to `parts` parts, and its head, the
    time of delivery, follows in a last part. Both ends compute the same parts.
    """

    peer: int
    tag: int
    parts: int = 1

    def outlet(self, wire: Wire, device: Device, link: Link, fds: Sequence[int]) -> Outlet:
        return _GlooOutlet(self, wire, device, link)

    def inlet(self, wire: Wire, device: Device, fds: Sequence[int]) -> Inlet:
        return _GlooInlet(self, wire, device)


class _Staging:
    """Host memory for one message; per kind, the same memory as flat parts and as arrays."""

    def __init__(self, wire: Wire, parts: int) -> None:
        import torch

        flat = np.zeros(wire.packed_nbytes, np.uint8)
        whole = torch.from_numpy(flat)
        self.deliver_s = np.ndarray((), np.float64, flat.data)
        self.arrays = {kind: arrays_in(flat.data, lay) for kind, lay in wire.layouts.items()}
        sizes = {kind: packed_nbytes(layout) for kind, layout in wire.layouts.items()}
        self.ends = {kind: _ends(nbytes, parts) for kind, nbytes in sizes.items()}
        self.parts = {
            kind: [whole[lo:hi] for lo, hi in pairwise([ALIGN, *ends])]
            + [whole[: ALIGN if ends else sizes[kind]]]
            for kind, ends in self.ends.items()
        }


def _ends(nbytes: int, parts: int) -> list[int]:
    """Return the ends in bytes of the parts of a message's body; empty for a whole message."""
    size = max(aligned(-(-(nbytes - ALIGN) // parts)), LEAST_PART_NBYTES)
    return [*range(ALIGN + size, nbytes, size), nbytes] if parts > 1 else []


class _GlooOutlet(Outlet):
    def __init__(self, port: GlooPort, wire: Wire, device: Device, link: Link) -> None:
        super().__init__(wire, device, link)
        self._port = port
        self._staging = _Staging(wire, port.parts)
        self._group = _group()
        self._sent = 0  # number of sent parts of the present message

    def _acquire(self, kind: Kind) -> list[Array]:
        return self._staging.arrays[kind]

    def _commit(self, kind: Kind, arrays: list[Array], deliver_s: float) -> None:
        self._staging.deliver_s[()] = deliver_s
        self._send(kind, len(self._staging.parts[kind]))
        self._sent = 0

    def _filled(self, kind: Kind, nbytes: int) -> None:
        self._send(kind, sum(end <= nbytes for end in self._staging.ends[kind]))

    def _send(self, kind: Kind, count: int) -> None:
        """Send the first `count` parts, without the parts that have left already."""
        try:
            for part in self._staging.parts[kind][self._sent : count]:
                self._group.send([part], self._port.peer, self._port.tag).wait()
        except RuntimeError as error:
            raise EdgeClosedError(str(error)) from error
        self._sent = count

    def close(self) -> None:
        """Do nothing: gloo's pairs end with the process."""


class _GlooInlet(Inlet):
    def __init__(self, port: GlooPort, wire: Wire, device: Device) -> None:
        super().__init__(wire, device)
        self._port = port
        self._staging = _Staging(wire, port.parts)
        self._group = _group()

    def _take(self, kind: Kind) -> tuple[list[Array], float]:
        try:
            for part in self._staging.parts[kind]:
                self._group.recv([part], self._port.peer, self._port.tag).wait()
        except RuntimeError as error:
            raise EdgeClosedError(str(error)) from error
        return self._staging.arrays[kind], float(self._staging.deliver_s)

    def _release(self) -> None:
        """Do nothing: the next receive reuses the staging memory."""

    def close(self) -> None:
        """Do nothing: gloo's pairs end with the process."""
