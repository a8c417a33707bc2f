"""The cluster file: reads TOML, and reports faults with file and line."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from hetpipe.cluster import member as member_module
from hetpipe.cluster.member import BackendOptions, Member
from hetpipe.cluster.topology import DUPLEXES, SHAPES, Link, Server, Topology
from hetpipe.cluster.transports import TRANSPORTS
from hetpipe.cluster.units import parse_bandwidth, parse_time
from hetpipe.errors import ClusterError, CostError
from hetpipe.files import user_path
from hetpipe.records import Count, Entries, Name, Number, OneOf, Parsed, Source, Whole, read_text
from hetpipe.toml import Lines, parse_toml
from hetpipe.words import choices, short

MOST_DEVICES = 100_000
USUAL_BPS = (1e6, 25e9)  # the slowest and the fastest usual network between servers
FASTEST_BPS = 250e9
"""No network between servers is faster. A bandwidth above the usual ones, but below this one, is
accepted without a warning if the file gives it in bits."""

_TOPOLOGY = {
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
    "server": "write each as a [[server]] table",
    "server.name": 'write name = "a"',
    "server.count": "write how many there are: count = 2",
    **{
        f"{place}{key}": _TOPOLOGY[key]
        for place in ("server.inside", "network")
        for key in _TOPOLOGY
    },
    "backend": "write the options of each as a table: [backend.NAME]",
    "link": "write each as a [[link]] table",
    "link.between": 'write between = ["one", "other"]',
}


class BandwidthWarning(UserWarning):
    """A bandwidth is unusual: perhaps the file says bytes where bits are meant."""


Many = Annotated[int | None, Whole(1, MOST_DEVICES)]


@dataclass(frozen=True)
class _Device:
    """A [[device]] table."""

    device: Name = ""
    board: Name = ""
    numerics: Name = ""  # of a board
    id: Name = ""  # empty: the device's id, or the board's id with a number
    count: Many = None  # None: one device
    server: Name = ""
    cores: tuple[Count, ...] = ()
    speed: Annotated[float, Number(0.0, 1.0, above=True)] = 1.0


@dataclass(frozen=True)
class _Topology:
    """A [network] table, or a server's `inside`."""

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


_ABSENT = _Topology(0.0)  # no file has such a bandwidth


@dataclass(frozen=True)
class _Server:
    """A [[server]] table."""

    name: Name
    count: Many = None  # None: one server, with the plain name
    inside: _Topology = _ABSENT

    @property
    def copies(self) -> tuple[str, ...]:
        """The names of the servers."""
        if self.count is None:
            return (self.name,)
        return tuple(f"{self.name}.{copy}" for copy in range(self.count))


@dataclass(frozen=True)
class _Link:
    """A [[link]] table."""

    between: Annotated[tuple[Name, ...], Entries(2, 2)]
    bandwidth: Annotated[float | None, Parsed(parse_bandwidth)] = None
    latency: Annotated[float | None, Parsed(parse_time)] = None


@dataclass(frozen=True)
class _Tables:
    """The whole file."""

    transport: Annotated[str, OneOf(TRANSPORTS)] = "auto"
    device: tuple[_Device, ...] = ()
    link: tuple[_Link, ...] = ()
    server: tuple[_Server, ...] = ()
    network: _Topology = _ABSENT
    backend: dict[str, dict[str, Any]] = field(default_factory=dict)


class ClusterFile(NamedTuple):
    """The content of a cluster file: the fields of a `Cluster`, in order."""

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link]
    transport: str
    places: dict[str, str]
    servers: tuple[Server, ...]
    network: Topology | None
    options: dict[str, BackendOptions]


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check a cluster file. Raises `ClusterError` with file, line, place and fault.

    Issues a `BandwidthWarning` if the [network] between servers has an unusual bandwidth.
    """
    path = user_path(path, ClusterError)
    text = read_text(path, ClusterError)
    data = parse_toml(text, path, ClusterError)
    lines = Lines(text)
    source = Source("the cluster", ClusterError, lambda at: f"{path}:{lines.at(at)}", CURES)
    tables = source.record(_Tables, data)
    servers = _servers(tables, source)
    _check_devices(tables, source)
    _check_backends(tables, source)
    members: dict[str, Member] = {}
    places: dict[str, str] = {}
    for index, member in _members(tables):
        table = tables.device[index]
        key = "board" if table.board else "device"
        if member.id in members:
            why = f"is {short(member.id)}: two devices have the id, and ids are unique"
            raise source.fault(("device", index, "id" if table.id else key), why)
        members[member.id] = member
        device_key = "numerics" if table.numerics else key
        places[member.id] = f"{path}:{lines.at(('device', index, device_key))}"
    links, network = _links(tables, members, source), tables.network.topology()
    if network is not None:
        where = f"{path}:{lines.at(('network', 'bandwidth'))}"
        _warn_of_unusual_bandwidth(tables.network.bandwidth, data["network"]["bandwidth"], where)
    options = {
        name: BackendOptions(
            values, path.parent.absolute(), f"{path}:{lines.at(('backend', name))}"
        )
        for name, values in tables.backend.items()
    }
    return ClusterFile(
        tuple(members.values()), links, tables.transport, places, servers, network, options
    )


def _servers(tables: _Tables, source: Source) -> tuple[Server, ...]:
    servers: list[Server] = []
    names: set[str] = set()
    total = 0
    for index, table in enumerate(tables.server):
        total += table.count or 1
        if total > MOST_DEVICES:
            why = f"makes {total} servers of the cluster; a cluster has at most {MOST_DEVICES}"
            raise source.fault(("server", index), why, "count")
    for index, table in enumerate(tables.server):
        for name in {table.name, *table.copies}:
            if name in names:
                why = f"gives {short(name)}: two servers have the name, and names are unique"
                raise source.fault(("server", index, "name"), why)
            names.add(name)
        servers += [Server(name, table.inside.topology()) for name in table.copies]
    return tuple(servers)


def _check_devices(tables: _Tables, source: Source) -> None:
    """Raise `ClusterError` for impossible [[device]] tables, and for no devices or too many."""
    if not tables.device:
        raise source.fault((), "has no device; give it one or more [[device]] tables")
    copies = {table.name: table.count or 1 for table in tables.server} | {"": 1}
    total = 0
    for index, table in enumerate(tables.device):
        _check_hardware(table, index, source)
        if table.server not in copies:
            there = choices(table.server, filter(None, copies))
            why = f"names no server: {short(table.server)}; {there}"
            raise source.fault(("device", index, "server"), why)
        total += (table.count or 1) * copies[table.server]
        if total > MOST_DEVICES:
            why = f"makes {total} devices of the cluster; a cluster has at most {MOST_DEVICES}"
            raise source.fault(("device", index), why, "count")


def _check_backends(tables: _Tables, source: Source) -> None:
    """Raise `ClusterError` for a [backend.NAME] table if the cluster has no device of the
    backend."""
    used = dict.fromkeys(table.device.partition(":")[0] for table in tables.device if table.device)
    for name in tables.backend:
        if name not in used:
            why = f"has options, but no device is of that backend; {choices(name, used)}"
            raise source.fault(("backend", name), why)


def _check_hardware(table: _Device, index: int, source: Source) -> None:
    """Raise `ClusterError` for an impossible device or board, and for cores that this machine
    lacks."""
    if table.numerics and not table.board:
        why = (
            "computes the numbers of a board, but the table has no board; add board ="
            ' "v100-sxm-16", or write device instead of numerics'
        )
        raise source.fault(("device", index, "numerics"), why)
    if bool(table.device) == bool(table.board):
        both = "both a device and a board" if table.board else "neither a device nor a board"
        why = f'has {both}; write device = "backend:name:index" or board = "v100-sxm-16"'
        raise source.fault(("device", index), why, "board" if table.board else "")
    if table.board:
        from hetpipe.cost.board import board

        try:
            board(table.board)
        except CostError as error:
            raise source.fault(("device", index, "board"), f"is unknown: {error}") from error
        if table.speed != _Device.speed:
            why = "is only for attached devices, and a board's times are modelled; leave it out"
            raise source.fault(("device", index, "speed"), why)
        if table.cores and not table.numerics:
            why = "is for attached devices and numerics, and this board has neither; leave it out"
            raise source.fault(("device", index, "cores"), why)
    absent = set(table.cores) - set(member_module.available_cores()) if table.cores else ()
    if absent:
        there = ", ".join(map(str, member_module.available_cores()))
        why = f"has cores {short(sorted(absent))}, which are not among this machine's: {there}"
        raise source.fault(("device", index, "cores"), why)


def _members(tables: _Tables) -> Iterator[tuple[int, Member]]:
    """Yield the members, each with the index of its table.

    All devices of one copy of a server come before the devices of the next copy. The numbers at the
    end of ids continue through the whole cluster.
    """
    numbers: Counter[str] = Counter()
    copies = {table.name: table.copies for table in tables.server if table.count is not None}
    together: dict[str, list[tuple[int, _Device]]] = {name: [] for name in copies}
    for index, table in enumerate(tables.device):
        if table.server in together:
            together[table.server].append((index, table))
    for index, table in enumerate(tables.device):
        rows = [(index, table)]
        if table.server in copies:
            # Empty if an earlier table has yielded all devices of this server.
            rows = together.pop(table.server, [])
        for server in copies.get(table.server, (table.server,)):
            for row, device in rows:
                for id in _ids(device, table.server in copies, numbers):
                    yield row, _member(device, id, server)


def _ids(table: _Device, copied: bool, numbers: Counter[str]) -> Iterator[str]:
    prefix = table.id or table.device or table.board
    if table.count is None and not copied and (table.id or table.device):
        yield prefix
        return
    for _ in range(table.count or 1):
        yield f"{prefix}.{numbers[prefix]}"
        numbers[prefix] += 1


def _member(table: _Device, id: str, server: str) -> Member:
    return Member(id, table.device, table.cores, table.speed, table.board, server, table.numerics)


def _warn_of_unusual_bandwidth(bandwidth_Bps: float, written: str, where: str) -> None:
    """Warn of a network with an unusual bandwidth, which the file states as `written`."""
    least, most = USUAL_BPS
    in_bits = "b/s" in written
    if least <= bandwidth_Bps < (FASTEST_BPS if in_bits else most):
        return
    cure = "networks are sold by bits: write Gb/s if bits are meant"
    if (in_bits and bandwidth_Bps >= most) or "Gb/s" in written:
        cure = f"networks between servers have {8 * least:g} to {8 * FASTEST_BPS:g} b/s: check it"
    text = (
        f"{where}: the network has {bandwidth_Bps:g} B/s, which is {8 * bandwidth_Bps:g} b/s; "
        f"{cure}"
    )
    warnings.warn(text, BandwidthWarning, stacklevel=3)


def _links(
    tables: _Tables, members: dict[str, Member], source: Source
) -> dict[frozenset[str], Link]:
    links: dict[frozenset[str], Link] = {}
    for index, table in enumerate(tables.link):
        for end, id in enumerate(table.between):
            if id not in members:
                why = f"names no device: {short(id)}; {choices(id, members)}"
                raise source.fault(("link", index, "between", end), why)
        pair = frozenset(table.between)
        if len(pair) != 2:
            why = f"is {short(table.between)}: a link joins two different devices"
            raise source.fault(("link", index, "between"), why)
        if pair in links:
            why = f"is a second link between {' and '.join(sorted(pair))}"
            raise source.fault(("link", index), why)
        links[pair] = Link(table.latency, table.bandwidth)
    return links
