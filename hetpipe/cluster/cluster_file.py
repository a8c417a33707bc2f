"""The cluster file: reads TOML, and reports faults with file and line."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hetpipe.cluster import member as member_module
from hetpipe.cluster.file_tables import CURES, MOST_DEVICES, DeviceTable, Tables
from hetpipe.cluster.member import BackendOptions, Member
from hetpipe.cluster.topology import Link, Server, Topology
from hetpipe.errors import ClusterError, CostError
from hetpipe.files import user_path
from hetpipe.hosts.facts import problem_of_name
from hetpipe.records import Source, read_text
from hetpipe.toml import Lines, parse_toml
from hetpipe.words import choices, short, words

USUAL_BPS = (1e6, 25e9)  # the slowest and the fastest usual network between servers
FASTEST_BPS = 250e9
"""No network between servers is faster. A bandwidth above the usual ones, but below this one, is
accepted without a warning if the file gives it in bits."""


class BandwidthWarning(UserWarning):
    """A bandwidth is unusual: perhaps the file says bytes where bits are meant."""


class ClusterFile(NamedTuple):
    """The content of a cluster file: the fields of a `Cluster`, in order."""

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link]
    transport: str
    places: dict[str, str]
    servers: tuple[Server, ...]
    network: Topology | None
    options: dict[str, BackendOptions]

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the hosts."""
        return tuple(server.name for server in self.servers if server.is_host)


def read_cluster_file(path: Path, *, meets: bool = False) -> ClusterFile:
    """Read and check a cluster file. Raises `ClusterError` with file, line, place and fault.

    If its hosts meet (`meets`), a host without a [[device]] table will offer its usual devices.
    Issues a `BandwidthWarning` if the [network] between servers has an unusual bandwidth.
    """
    path = user_path(path, ClusterError)
    text = read_text(path, ClusterError)
    data = parse_toml(text, path, ClusterError)
    lines = Lines(text)
    source = Source("the cluster", ClusterError, lambda at: f"{path}:{lines.at(at)}", CURES)
    tables = source.record(Tables, data)
    servers = _hosts(tables, source) + _servers(tables, source)
    _check_devices(tables, source)
    if not meets:
        _check_bare_hosts(tables, source)
    elif not tables.host:
        raise source.fault((), "has no host; give each a [[host]] table (docs/hosts.md)")
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


def _hosts(tables: Tables, source: Source) -> tuple[Server, ...]:
    names: dict[str, str] = {}  # by the name in small letters
    for index, table in enumerate(tables.host):
        if problem := problem_of_name(table.name):
            raise source.fault(("host", index, "name"), f"is wrong: {problem}")
        other = names.setdefault(table.name.lower(), table.name)
        if len(names) == index:
            why = (
                f"is {short(table.name)}, but another host is {short(other)}; give it another name"
            )
            raise source.fault(("host", index, "name"), why)
    return tuple(Server(table.name, table.inside.topology(), True) for table in tables.host)


def _servers(tables: Tables, source: Source) -> tuple[Server, ...]:
    servers: list[Server] = []
    hosts = {table.name for table in tables.host}
    names = {*hosts}
    total = 0
    for index, table in enumerate(tables.server):
        total += table.count or 1
        if total > MOST_DEVICES:
            why = f"makes {total} servers of the cluster; a cluster has at most {MOST_DEVICES}"
            raise source.fault(("server", index), why, "count")
    for index, table in enumerate(tables.server):
        for name in {table.name, *table.copies}:
            if name in names:
                both = "a host and a server" if name in hosts else "two servers"
                why = f"gives {short(name)}: {both} have the name, and names are unique"
                raise source.fault(("server", index, "name"), why)
            names.add(name)
        servers += [Server(name, table.inside.topology()) for name in table.copies]
    return tuple(servers)


def _check_devices(tables: Tables, source: Source) -> None:
    """Raise `ClusterError` for impossible [[device]] tables, and for no devices or too many."""
    if not tables.device and not tables.host:
        raise source.fault((), "has no device; give it one or more [[device]] tables")
    copies = {table.name: table.count or 1 for table in tables.server} | {"": 1}
    total = 0
    for index, table in enumerate(tables.device):
        _check_hardware(table, index, source)
        _check_host(table, index, tables, source)
        if table.server not in copies:
            there = choices(table.server, filter(None, copies))
            why = f"names no server: {short(table.server)}; {there}"
            raise source.fault(("device", index, "server"), why)
        total += (table.count or 1) * copies[table.server]
        if total > MOST_DEVICES:
            why = f"makes {total} devices of the cluster; a cluster has at most {MOST_DEVICES}"
            raise source.fault(("device", index), why, "count")


def _check_bare_hosts(tables: Tables, source: Source) -> None:
    """Raise `ClusterError` for a host without a [[device]] table."""
    used = {table.host for table in tables.device}
    for index, host in enumerate(tables.host):
        if host.name not in used:
            why = (
                "has no [[device]] table, so its devices are known only once the hosts have met: "
                "write its devices, or use hp.Cluster.load_hosts (docs/hosts.md)"
            )
            raise source.fault(("host", index), why)


def _check_host(table: DeviceTable, index: int, tables: Tables, source: Source) -> None:
    """Raise `ClusterError` if a device has no host, and others do, or an unknown host."""
    hosts = [host.name for host in tables.host]
    if hosts and not table.host:
        why = f"has no host, but the cluster has hosts: write one of {words(hosts)} as its host"
        raise source.fault(("device", index), why)
    if table.host and table.host not in hosts:
        why = f"names no host: {short(table.host)}; {choices(table.host, hosts)}"
        raise source.fault(("device", index, "host"), why)
    if table.host and table.server:
        why = f"is {short(table.server)}, but the device is in host {table.host}; leave out one"
        raise source.fault(("device", index, "server"), why)
    if table.host and table.id.startswith(f"{table.host}/"):
        why = f"is {short(table.id)}, and the host would come before it again; leave out the host"
        raise source.fault(("device", index, "id"), why)


def _check_backends(tables: Tables, source: Source) -> None:
    """Raise `ClusterError` for a [backend.NAME] table if the cluster has no device of the
    backend."""
    used = dict.fromkeys(table.device.partition(":")[0] for table in tables.device if table.device)
    for name in tables.backend:
        if name not in used:
            why = f"has options, but no device is of that backend; {choices(name, used)}"
            raise source.fault(("backend", name), why)


def _check_hardware(table: DeviceTable, index: int, source: Source) -> None:
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
        if table.speed != DeviceTable.speed:
            why = "is only for attached devices, and a board's times are modelled; leave it out"
            raise source.fault(("device", index, "speed"), why)
        if table.cores and not table.numerics:
            why = "is for attached devices and numerics, and this board has neither; leave it out"
            raise source.fault(("device", index, "cores"), why)
    here = table.cores and not table.host
    absent = set(table.cores) - set(member_module.available_cores()) if here else ()
    if absent:
        there = ", ".join(map(str, member_module.available_cores()))
        why = f"has cores {short(sorted(absent))}, which are not among this machine's: {there}"
        raise source.fault(("device", index, "cores"), why)


def _members(tables: Tables) -> Iterator[tuple[int, Member]]:
    """Yield the members, each with the index of its table.

    All devices of one copy of a server come before the devices of the next copy. The numbers at the
    end of ids continue through the whole cluster.
    """
    numbers: Counter[str] = Counter()
    copies = {table.name: table.copies for table in tables.server if table.count is not None}
    together: dict[str, list[tuple[int, DeviceTable]]] = {name: [] for name in copies}
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


def _ids(table: DeviceTable, copied: bool, numbers: Counter[str]) -> Iterator[str]:
    name = table.id or table.device or table.board
    prefix = f"{table.host}/{name}" if table.host else name
    if table.count is None and not copied and (table.id or table.device):
        yield prefix
        return
    for _ in range(table.count or 1):
        yield f"{prefix}.{numbers[prefix]}"
        numbers[prefix] += 1


def _member(table: DeviceTable, id: str, server: str) -> Member:
    return Member(
        id,
        table.device,
        table.cores,
        table.speed,
        table.board,
        server or table.host,
        table.numerics,
        table.host,
    )


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
    tables: Tables, members: dict[str, Member], source: Source
) -> dict[frozenset[str], Link]:
    links: dict[frozenset[str], Link] = {}
    for index, table in enumerate(tables.link):
        for end, id in enumerate(table.between):
            if id not in members:
                hosts = [host.name for host in tables.host if host.name == id.partition("/")[0]]
                why = f"names no device: {short(id)}; {choices(id, members)}"
                if id in hosts:
                    why = f"names host {id}, but a link joins two devices; write {id}/DEVICE"
                elif hosts and not any(member.host == hosts[0] for member in members.values()):
                    why = f"is {short(id)}, but host {hosts[0]} has no [[device]] table; add one"
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
