"""Cluster: the devices that a model may use, and the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hetpipe.cluster.cluster_file import ClusterFile, read_cluster_file
from hetpipe.cluster.member import BackendOptions, Member, check_member
from hetpipe.cluster.published import read_paper_cluster
from hetpipe.cluster.topology import Layout, Link, Server, Topology, check_link
from hetpipe.cluster.transports import transport_of
from hetpipe.errors import ClusterError
from hetpipe.hosts.hosts import Hosts
from hetpipe.html import table_html
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import choices


@dataclass(frozen=True)
class Cluster:
    """Devices in pipeline order, links by pair of ids (in any order), servers and their network.

    An attached device is looked up only when its worker starts. A link between two members
    overrides servers and network. Raises `ClusterError` for impossible values.
    """

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    transport: str = "auto"  # see `hetpipe.cluster.transports`
    places: Mapping[str, str] = field(default_factory=dict, compare=False)  # file:line by member id
    servers: tuple[Server, ...] = ()
    network: Topology | None = None  # between servers; a device without a server counts as a server
    options: Mapping[str, BackendOptions] = field(default_factory=dict)  # by name of the backend
    connections: Hosts | None = field(default=None, compare=False, repr=False)  # to other hosts

    def __post_init__(self) -> None:
        transport_of(self.transport)
        if not self.members:
            raise ClusterError("the cluster has no device; give it one or more")
        servers = _unique([server.name for server in self.servers], "servers", "name")
        _unique(self.ids, "devices", "id")
        for member in self.members:
            check_member(member)
            if member.server and member.server not in servers:
                there = choices(member.server, servers)
                raise ClusterError(f"{member.id}: no server {member.server!r}; {there}")
        for pair, link in self.links.items():
            _check_link(pair, link, self._by_id)

    def _repr_html_(self) -> str:
        columns = ("member", "device or board", "cores", "speed", "server")
        rows = list(map(_row, self.members))
        return table_html(f"Cluster, transport {self.transport}", columns, rows)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple(member.id for member in self.members)

    @property
    def described(self) -> tuple[Member, ...]:
        """The members that are boards, with numerics or without. Their times are modelled."""
        return tuple(member for member in self.members if member.board)

    @property
    def boards_without_numerics(self) -> tuple[Member, ...]:
        """The boards without numerics: no worker can start for them."""
        return tuple(member for member in self.members if not member.opened_device)

    @cached_property
    def members_sharing_cores(self) -> frozenset[str]:
        """Ids of the members that share a CPU core with another member."""
        uses = Counter((m.machine, core) for m in self.members for core in m.cores)
        return frozenset(
            m.id for m in self.members if any(uses[m.machine, core] > 1 for core in m.cores)
        )

    def member(self, member_id: str) -> Member:
        """Return the member with this id. Raises `ClusterError` if there is none."""
        if member_id not in self._by_id:
            raise ClusterError(f"no device {member_id!r}; {choices(member_id, self.ids)}")
        return self._by_id[member_id]

    def link(self, one: str, other: str) -> Link:
        """Return the link between two members. Over several hops, latencies add up.

        A latency or bandwidth is None if the cluster does not describe it. Raises `ClusterError`
        for unknown members, and for a board's link without a bandwidth.
        """
        first, second = self.member(one), self.member(other)
        if first is second:
            return Link(0.0, math.inf)
        link = self._layout.link(one, other)
        if pair := self._pair_link(one, other):
            latency_s = link.latency_s if pair.latency_s is None else pair.latency_s
            bandwidth_Bps = link.bandwidth_Bps if pair.bandwidth_Bps is None else pair.bandwidth_Bps
            link = Link(latency_s, bandwidth_Bps)
        if link.bandwidth_Bps is None and (first.board or second.board):
            raise ClusterError(
                f"nothing describes the bandwidth between {one} and {other}: add a [[link]] "
                f"between them, or {self._layout.missing_table(one, other)}"
            )
        return link

    def emulated_link(self, one: str, other: str) -> Link | None:
        """Return the [[link]] that delays messages between two attached members, or None.

        Messages from or to a board are not delayed: their times are modelled.
        """
        if self.member(one).board or self.member(other).board:
            return None
        return self._pair_link(one, other)

    def sum_speed(self, one: str, other: str) -> float:
        """Return the bandwidth of sums over replicas, relative to the bandwidth of messages."""
        pair = self._pair_link(one, other)
        return 1.0 if pair and pair.bandwidth_Bps else self._layout.sum_speed(one, other)

    def way(self, one: str, other: str) -> tuple[str, ...]:
        """Return the media (links, buses) that a message between two members occupies, in order.

        The result is empty if nothing describes the media, or if only messages of this pair, in
        this direction, use them. Raises `ClusterError` for unknown members.
        """
        if self.member(one) is self.member(other):
            return ()
        pair = self._pair_link(one, other)
        is_private = pair is not None and pair.bandwidth_Bps is not None
        return () if is_private else self._layout.way(one, other)

    def is_member(self, member_id: str) -> bool:
        """Return whether the cluster has a member with this id."""
        return member_id in self._by_id

    @property
    def describes_all_links(self) -> bool:
        """Whether servers and network describe the bandwidth of every link."""
        return self._layout.describes_all

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """Return groups of members' ids: one for each server, and one for each member without a
        server."""
        return self._layout.groups

    def levels(self) -> tuple[tuple[int, float], ...]:
        """Return, by level, the number of components and the bandwidth (B/s) between them.

        The components are the devices of a server at the inner level, and the servers at the outer
        level. Raises `ClusterError` if servers or links differ from each other, or if a bandwidth
        is unknown.
        """
        if not self.links:
            return self._layout.levels()
        count = len(self.members)
        return ((count, _equal_Bps(list(self.links.values()), count * (count - 1) // 2)),)

    def _pair_link(self, one: str, other: str) -> Link | None:
        return self.links.get(frozenset((one, other))) if self.links else None

    @cached_property
    def _by_id(self) -> dict[str, Member]:
        return {member.id: member for member in self.members}

    @cached_property
    def _layout(self) -> Layout:
        devices = [(member.id, member.server) for member in self.members]
        return Layout(devices, self.servers, self.network)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read a TOML file (docs/clusters.md). Raises `ClusterError` with the line.

        A training on the hosts of a file needs `load_hosts`.
        """
        return Cluster(*read_cluster_file(Path(path)))

    @staticmethod
    def load_hosts(
        path: str | Path,
        meet: str | None = None,
        agents: Sequence[str] = (),
        *,
        name: str = "",
        limit_s: float = 120.0,
    ) -> Cluster:
        """Return the cluster of a file with hosts (docs/hosts.md), once all of them have met.

        The hosts meet as in `hosts`; only this process reads the file. Raises `ClusterError` for a
        host that does not come, or that the file does not name.
        """
        from hetpipe.cluster.hosts import meet_hosts, serve_other_ranks

        if meet is None and not agents:
            serve_other_ranks(name, limit_s)
        file = read_cluster_file(Path(path), meets=True)
        connections = meet_hosts(meet, len(file.hosts), agents, name, limit_s, file.hosts)
        try:
            return connected(file, connections)
        except BaseException:
            connections.close()
            raise

    @staticmethod
    def published(name: str) -> Cluster:
        """Return a paper's cluster, such as "pipedream-a" (docs/clusters.md). Raises
        `ClusterError`, with the known names, for an unknown name."""
        return Cluster(*read_paper_cluster(name))

    @staticmethod
    def with_ids(ids: Sequence[str]) -> Cluster:
        """Return a cluster of members with ids alone, for plans from a cost table."""
        return Cluster(tuple(Member(id, id) for id in ids))

    @staticmethod
    def local(
        backends: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        emulate_speed: Mapping[str, float] | None = None,
        *,
        rank: Callable[[DeviceInfo], float] | None = None,
    ) -> Cluster:
        """Return a cluster of this machine's devices, by the rules of `local_members`."""
        from hetpipe.cluster.local import local_members

        return Cluster(tuple(local_members(backends, devices, emulate_speed or {}, rank)))

    @staticmethod
    def hosts(
        meet: str | None = None,
        count: int | None = None,
        agents: Sequence[str] = (),
        *,
        devices: Sequence[str] | None = None,
        emulate_speed: Mapping[str, float] | None = None,
        transport: str = "auto",
        name: str = "",
        limit_s: float = 120.0,
    ) -> Cluster:
        """Return a cluster of the devices of several hosts (docs/hosts.md).

        Under torchrun, rank 0 returns, and all other ranks serve as agents and exit here. Without
        torchrun, `meet` is the address where this process waits for the agents of `count` - 1 other
        hosts; or `agents` are the addresses of agents that stay. Devices are named `host/device`,
        and a host alone names its usual devices. `name` is this host's name. Waits up to `limit_s`
        seconds. Raises `ClusterError`.
        """
        from hetpipe.cluster.hosts import meet_hosts

        transport_of(transport)
        connections = meet_hosts(meet, count, agents, name, limit_s)
        try:
            return Cluster.on(connections, devices, emulate_speed or {}, transport)
        except BaseException:
            connections.close()
            raise

    @staticmethod
    def on(
        connections: Hosts,
        devices: Sequence[str] | None,
        emulate_speed: Mapping[str, float],
        transport: str = "auto",
    ) -> Cluster:
        """Return a cluster of devices of connected hosts; see `hosts`."""
        from hetpipe.cluster.hosts import members_of

        members = members_of(connections, devices, emulate_speed)
        servers = tuple(Server(facts.name, is_host=True) for facts in connections.facts)
        return Cluster(members, transport=transport, servers=servers, connections=connections)


def load_or_published(text: str) -> Cluster:
    """Return the cluster of a file, or a paper's cluster if no file has this name.

    A name with a suffix always names a file. Raises `ClusterError`.
    """
    path = Path(text)
    return Cluster.load(path) if path.suffix or path.exists() else Cluster.published(text)


def connected(file: ClusterFile, connections: Hosts) -> Cluster:
    """Return the cluster of a file whose hosts have met; see `Cluster.load_hosts`."""
    from hetpipe.cluster.hosts import members_of_file

    members = members_of_file(file.members, file.hosts, connections)
    return Cluster(*file._replace(members=members), connections=connections)


def _equal_Bps(links: Sequence[Link], pairs: int) -> float:
    """Return the bandwidth of the links of all pairs. Raises `ClusterError` if they differ."""
    first = links[0].bandwidth_Bps
    if any(link.bandwidth_Bps != first for link in links):
        raise ClusterError("the cluster is irregular: its links have several bandwidths")
    if len(links) < pairs or first is None:
        raise ClusterError(
            f"the cluster is irregular: {len(links)} of {pairs} pairs have a separate link; give "
            "every pair a link with a bandwidth, or describe all links by servers and the network"
        )
    return first


def _row(member: Member) -> tuple[str, ...]:
    """Return a member's row in the table of a cluster."""
    return (
        member.id,
        member.device or f"{member.board} (board)",
        ", ".join(map(str, member.cores)) or "any",
        f"{member.speed:g}" + (" (emulated)" if member.speed != 1.0 else ""),
        member.server or "none",
    )


def _unique(names: Sequence[str], kind: str, key: str) -> set[str]:
    unique: set[str] = set()
    for name in names:
        if name in unique:
            raise ClusterError(f"two {kind} have the {key} {name!r}; {key}s are unique")
        unique.add(name)
    return unique


def _check_link(pair: frozenset[str], link: Link, members: Mapping[str, Member]) -> None:
    for member_id in sorted(pair):
        if member_id not in members:
            raise ClusterError(f"a link names {member_id!r}; {choices(member_id, members)}")
    name = " - ".join(sorted(pair))
    if len(pair) != 2:
        raise ClusterError(f"link {name}: a link joins two different devices; name two")
    check_link(name, link.latency_s, link.bandwidth_Bps)
