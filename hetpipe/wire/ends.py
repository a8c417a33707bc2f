"""The ends of wires, before and after the host of their worker connects them."""

from __future__ import annotations

from dataclasses import dataclass, field

from hetpipe.cluster.topology import Link
from hetpipe.wire.transport import Port
from hetpipe.wire.wire import Wire


@dataclass(frozen=True)
class Route:
    """How a wire between two hosts is connected.

    `name` is unique; `address` is the port of the receiver's host. `ahead_s` is how far the
    receiver's clock is ahead of the sender's. Hosts that are `near` can share memory.
    """

    name: str
    address: tuple[str, int]
    ahead_s: float
    near: bool


@dataclass(frozen=True)
class Plug:
    """How one end of a wire is connected; see `Transport` in `hetpipe.cluster.transports`."""

    tag: int
    """The number of the wire, the same at both ends."""
    sends: bool
    ranks: tuple[int, int]
    pieces: int
    direct: bool
    route: Route | None = None  # between hosts


@dataclass(frozen=True)
class WireEnd:
    """The end of a wire at a worker, before it is connected. Without a plug, both ends are at this
    worker."""

    wire: Wire
    plug: Plug | None
    link: Link = field(default_factory=Link)


@dataclass(frozen=True)
class EdgeEnd:
    """The connected end of a wire at a worker. Without a port, both ends are at this worker."""

    wire: Wire
    port: Port | None
    link: Link
    fds: tuple[int, int]  # the port's descriptors in the message: from, to (excluded)
    neighbour: int = -1  # the worker at the other end


@dataclass(frozen=True)
class Severed:
    """To the controller: the wire to this neighbour, a worker of the crew, is broken."""

    neighbour: int
    reason: str


@dataclass(frozen=True)
class Edges:
    """The ends of wires for the next `Load`. The worker does not reply."""

    ends: tuple[EdgeEnd, ...]
