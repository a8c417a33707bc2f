"""The tables of a cluster file, as records, and how to mend a fault in them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hetpipe.cluster.topology import DUPLEXES, SHAPES, Topology
from hetpipe.cluster.transports import TRANSPORTS
from hetpipe.cluster.units import parse_bandwidth, parse_time
from hetpipe.records import Count, Entries, Name, Number, OneOf, Parsed, Whole

MOST_DEVICES = 100_000
_TOPOLOGY_CURES = {
    "": 'write { shape = "switch", bandwidth = "25 Gb/s" }',
    ".bandwidth": 'write bandwidth = "25 Gb/s"',
    ".latency": 'write latency = "5 us"',
    ".all_reduce": 'write all_reduce = "50 GB/s"',
}
CURES = {
    "device": "write each as a [[device]] table",
    "device.count": "write how many there are: count = 8",
    "device.cores": "write whole numbers: cores = [0, 1]",
    "device.speed": "write a number above 0, at most 1",
    "host": "write each as a [[host]] table",
    "host.name": 'write name = "a"',
    "server": "write each as a [[server]] table",
    "server.name": 'write name = "a"',
    "server.count": "write how many there are: count = 2",
    **{
        f"{place}{key}": _TOPOLOGY_CURES[key]
        for place in ("host.inside", "server.inside", "network")
        for key in _TOPOLOGY_CURES
    },
    "backend": "write the options of each as a table: [backend.NAME]",
    "link": "write each as a [[link]] table",
    "link.between": 'write between = ["one", "other"]',
}

Many = Annotated[int | None, Whole(1, MOST_DEVICES)]


@dataclass(frozen=True)
class DeviceTable:
    """A [[device]] table."""

    device: Name = ""
    board: Name = ""
    numerics: Name = ""  # of a board
    id: Name = ""  # empty: the device's id, or the board's id with a number
    count: Many = None  # None: one device
    host: Name = ""
    server: Name = ""
    cores: tuple[Count, ...] = ()
    speed: Annotated[float, Number(0.0, 1.0, above=True)] = 1.0


@dataclass(frozen=True)
class TopologyTable:
    """A [network] table, or `inside` of a server or a host."""

    bandwidth: Annotated[float, Parsed(parse_bandwidth)]
    latency: Annotated[float, Parsed(parse_time)] = 0.0
    shape: Annotated[str, OneOf(SHAPES)] = SHAPES[0]
    duplex: Annotated[str, OneOf(DUPLEXES)] = DUPLEXES[0]
    all_reduce: Annotated[float | None, Parsed(parse_bandwidth)] = None

    def topology(self) -> Topology | None:
        """Return the topology; None for an absent table."""
        if not self.bandwidth:
            return None
        return Topology(self.latency, self.bandwidth, self.shape, self.duplex, self.all_reduce)


_ABSENT = TopologyTable(0.0)  # no file has such a bandwidth


@dataclass(frozen=True)
class ServerTable:
    """A [[server]] table."""

    name: Name
    count: Many = None  # None: one server, with the plain name
    inside: TopologyTable = _ABSENT

    @property
    def copies(self) -> tuple[str, ...]:
        """The names of the servers."""
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}.{copy}" for copy in range(self.count))


@dataclass(frozen=True)
class HostTable:
    """A [[host]] table."""

    name: Name
    inside: TopologyTable = _ABSENT


@dataclass(frozen=True)
class LinkTable:
    """A [[link]] table."""

    between: Annotated[tuple[Name, ...], Entries(2, 2)]
    bandwidth: Annotated[float | None, Parsed(parse_bandwidth)] = None
    latency: Annotated[float | None, Parsed(parse_time)] = None


@dataclass(frozen=True)
class Tables:
    """The whole file."""

    transport: Annotated[str, OneOf(TRANSPORTS)] = "auto"
    device: tuple[DeviceTable, ...] = ()
    link: tuple[LinkTable, ...] = ()
    host: tuple[HostTable, ...] = ()
    server: tuple[ServerTable, ...] = ()
    network: TopologyTable = _ABSENT
    backend: dict[str, dict[str, Any]] = field(default_factory=dict)
