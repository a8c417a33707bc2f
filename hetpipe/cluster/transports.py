"""Transports by name: how messages travel between the members of a cluster.

A new transport is a module and a row here.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.errors import ClusterError
from hetpipe.words import choices


@dataclass(frozen=True)
class Transport:
    """A transport, which `module` implements.

    The module's function `plugs(wire, ranks, tag, pieces, direct)` makes both ends of a wire. With
    `direct`, the devices may be able to copy into each other's memory. If `meets` is true, the
    module also has `host()` and `join(...)`; see `hetpipe.wire.gloo`.
    """

    name: str
    module: str
    in_threads: bool = False
    """Whether workers are threads of the controller's process."""
    meets: bool = False
    """Whether processes must meet before they can exchange messages."""
    streams: bool = False
    """Whether tensors between hosts of one machine take a network stream, not shared memory."""
    encrypts: bool = False
    """Whether these streams are encrypted."""

    @property
    def crosses_hosts(self) -> bool:
        """Whether members may be on several hosts; each host then uses the module for itself."""
        return not (self.in_threads or self.meets)


_TRANSPORTS = {
    "auto": Transport("shared-memory", "hetpipe.wire.sharedmemory"),  # all workers are on this host
    "local": Transport("local", "hetpipe.wire.handover", in_threads=True),
    "shared-memory": Transport("shared-memory", "hetpipe.wire.sharedmemory"),
    "tcp": Transport("tcp", "hetpipe.wire.sharedmemory", streams=True),
    "tls": Transport("tls", "hetpipe.wire.sharedmemory", streams=True, encrypts=True),
    "distributed": Transport("distributed", "hetpipe.wire.gloo", meets=True),
}
TRANSPORTS = tuple(_TRANSPORTS)


def transport_of(name: str) -> Transport:
    """Return the transport of this name. Raises `ClusterError` for an unknown name."""
    if name not in _TRANSPORTS:
        raise ClusterError(f"no transport {name!r}; {choices(name, TRANSPORTS)}")
    return _TRANSPORTS[name]
