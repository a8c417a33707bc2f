"""Cluster: the devices a model may use, their cores and speeds, and the links between them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from hetpipe.cluster.topology import Layout, Server, Topology, check_link
from hetpipe.cluster.topology import Link as Link  # who has a cluster's links need not look there
from hetpipe.cluster.transports import transport_of
from hetpipe.errors import ClusterError
from hetpipe.sdk.info import DeviceInfo

MOST_LISTED = 20
"""More names than these are not listed in an error."""


@dataclass(frozen=True)
class Member:
    """One device of a cluster, attached or only described. `id` is unique in the cluster.

    An attached one has `device`, a `DeviceInfo.id`; a described one has `board`, a `Board.id`. Of
    a board with `numerics`, a `DeviceInfo.id` too, that device computes the numbers; its time is
    modelled all the same.
    """

    id: str
    device: str
    cores: tuple[int, ...] = ()  # CPU cores its worker is pinned to; empty: not pinned
    speed: float = 1.0  # at most 1; 0.5 (emulated) doubles the time of every compute action
    board: str = ""
    server: str = ""  # empty: it is by itself
    numerics: str = ""  # of a board that takes part in a training

    @property
    def opened(self) -> str:
        """The device that its worker opens; empty for a board that is only described."""
        return self.numerics or self.device


@dataclass(frozen=True)
class BackendOptions:
    """The table `[backend.NAME]` of a cluster file, for `hetpipe.sdk.Backend.configure`."""

    values: Mapping[str, Any]
    folder: Path
    """That relative paths start from."""
    place: str = field(default="", compare=False)
    """Its file:line."""


@dataclass(frozen=True)
class Cluster:
    """Devices in pipeline order, links by pair of ids (either order), servers and their network.

    Attached devices may be absent: they are looked up when their workers start. A link goes before
    servers and network. Raises `ClusterError` for values that are invalid in themselves.
    """

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    transport: str = "auto"  # see `hetpipe.cluster.transports`
    places: Mapping[str, str] = field(default_factory=dict, compare=False)  # file:line by member id
    servers: tuple[Server, ...] = ()
    network: Topology | None = None  # between servers; a device by itself counts as one
    options: Mapping[str, BackendOptions] = field(default_factory=dict)  # by name of the backend

    def __post_init__(self) -> None:
        transport_of(self.transport)
        if not self.members:
            raise ClusterError("the cluster has no device; give it one or more")
        servers = _unique([server.name for server in self.servers], "servers", "name")
        _unique(self.ids, "devices", "id")
        for member in self.members:
            _check_member(member)
            if member.server and member.server not in servers:
                there = choices(member.server, tuple(servers)) or "none"
                raise ClusterError(
                    f"{member.id}: no server {member.server!r}; the cluster has {there}"
                )
        for pair, link in self.links.items():
            _check_link(pair, link, self._by_id)

    @cached_property
    def ids(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple(member.id for member in self.members)

    @property
    def described(self) -> tuple[Member, ...]:
        """The members that are boards: their times are modelled, with `numerics` or without."""
        return tuple(member for member in self.members if member.board)

    @property
    def unopened(self) -> tuple[Member, ...]:
        """The members on which nobody can start a worker: boards without numerics."""
        return tuple(member for member in self.members if not member.opened)

    @cached_property
    def sharing(self) -> frozenset[str]:
        """The members that are pinned to a core that others are pinned to."""
        taken = Counter(core for member in self.members for core in member.cores)
        return frozenset(
            member.id for member in self.members if any(taken[core] > 1 for core in member.cores)
        )

    def member(self, member_id: str) -> Member:
        """The member of that id. Raises `ClusterError`."""
        if member_id not in self._by_id:
            there = choices(member_id, self.ids)
            raise ClusterError(f"no device {member_id!r}; the cluster has {there}")
        return self._by_id[member_id]

    def link(self, one: str, other: str) -> Link:
        """The link between two members: the latencies of its hops together, the least bandwidth.

        Without a description it is the transport's own. Raises `ClusterError` where that cannot be,
        since one of them is a board, and for unknown members.
        """
        first, second = self.member(one), self.member(other)
        if first is second:
            return Link(0.0, math.inf)
        link = self._layout.link(one, other)
        if own := self._own_link(one, other):
            latency_s = link.latency_s if own.latency_s is None else own.latency_s
            bandwidth_Bps = link.bandwidth_Bps if own.bandwidth_Bps is None else own.bandwidth_Bps
            link = Link(latency_s, bandwidth_Bps)
        if link.bandwidth_Bps is None and (first.board or second.board):
            raise ClusterError(
                f"nothing describes the bandwidth between {one} and {other}: add a [[link]] "
                f"between them, or {self._layout.lack(one, other)}"
            )
        return link

    def emulated_link(self, one: str, other: str) -> Link | None:
        """The [[link]] by which messages between two members are held back, if there is one.

        Those from or to a board are not: their times are modelled.
        """
        if self.member(one).board or self.member(other).board:
            return None
        return self._own_link(one, other)

    def sum_speed(self, one: str, other: str) -> float:
        """The bandwidth of sums over replicas on a link, relative to that of messages."""
        own = self._own_link(one, other)
        return 1.0 if own and own.bandwidth_Bps else self._layout.sum_speed(one, other)

    def way(self, one: str, other: str) -> tuple[str, ...]:
        """The shared media that a message occupies on its way from one member to another.

        Empty where it shares nothing with messages of other pairs, or of the other direction.
        Raises `ClusterError` for unknown members.
        """
        if self.member(one) is self.member(other):
            return ()
        own = self._own_link(one, other)
        apart = own is not None and own.bandwidth_Bps is not None
        return () if apart else self._layout.way(one, other)

    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The members' ids by server, in order; one without a server is by itself."""
        return self._layout.groups

    def levels(self) -> tuple[tuple[int, float], ...]:
        """Components and bandwidth_Bps of every level, the innermost first: devices, then servers.

        Raises `ClusterError` if servers differ, if a link by itself makes some pair unlike the
        others, or if a bandwidth is not known.
        """
        if not self.links:
            return self._layout.levels()
        count, (first, *rest) = len(self.members), self.links.values()
        if any(link.bandwidth_Bps != first.bandwidth_Bps for link in rest):
            raise ClusterError("the cluster is irregular: its links have several bandwidths")
        if len(self.links) < count * (count - 1) // 2 or first.bandwidth_Bps is None:
            pairs = f"{len(self.links)} of {count * (count - 1) // 2} pairs"
            raise ClusterError(
                f"the cluster is irregular: {pairs} have a link of their own; give all pairs one, "
                "with a bandwidth, or leave links to servers and the network"
            )
        return ((count, first.bandwidth_Bps),)

    def _own_link(self, one: str, other: str) -> Link | None:
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
        """A cluster from a TOML file (docs/clusters.md). Raises `ClusterError` with the line."""
        from hetpipe.cluster.file import load

        return load(Path(path))

    @staticmethod
    def published(name: str) -> Cluster:
        """A cluster of a paper, such as "pipedream-a" (docs/clusters.md). Raises `ClusterError`."""
        from hetpipe.cluster.published import published

        return published(name)

    @staticmethod
    def local(
        backends: Sequence[str] | None = None,
        devices: Sequence[str] | None = None,
        emulate_speed: Mapping[str, float] | None = None,
        *,
        rank: Callable[[DeviceInfo], float] | None = None,
    ) -> Cluster:
        """The usable devices of this machine; see `hetpipe.cluster.local.local` for the rules."""
        from hetpipe.cluster.local import local

        return local(backends, devices, emulate_speed or {}, rank)


def available_cores() -> tuple[int, ...]:
    """The cores that this process may pin workers to."""
    import os

    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def choices(name: str, known: Sequence[str]) -> str:
    """The known names for an error message; of many only those that are near to the wrong one."""
    if len(known) <= MOST_LISTED:
        return ", ".join(known)
    near = get_close_matches(name, known, n=3)
    return f"{len(known)} of them{', near it: ' if near else ''}{', '.join(near)}"


def _unique(names: Sequence[str], kind: str, key: str) -> set[str]:
    there: set[str] = set()
    for name in names:
        if name in there:
            raise ClusterError(f"two {kind} have the {key} {name!r}; {key}s are unique")
        there.add(name)
    return there


def _check_member(member: Member) -> None:
    if bool(member.device) == bool(member.board):
        both = "both a device and a board" if member.board else "neither a device nor a board"
        raise ClusterError(f"{member.id}: it has {both}; give it one of the two")
    if member.numerics and not member.board:
        raise ClusterError(
            f"{member.id}: it has numerics, {member.numerics}, and no board whose time counts: "
            "give it a board, or name the device as its device"
        )
    if member.board and member.speed != 1.0:
        raise ClusterError(
            f"{member.id}: it is a board, {member.board}, whose times are modelled, and only "
            "attached devices have an emulated speed: leave it out"
        )
    if member.board and member.cores and not member.numerics:
        raise ClusterError(
            f"{member.id}: it is a board, {member.board}, and only attached devices and numerics "
            "have cores: leave them out"
        )
    if not 0 < member.speed <= 1:  # a device can be held back, not hurried
        raise ClusterError(f"{member.id}: speed is {member.speed}, it must be above 0, at most 1")
    absent = sorted(set(member.cores) - set(available_cores())) if member.cores else []
    if absent:
        present = ", ".join(map(str, available_cores()))
        raise ClusterError(f"{member.id}: cores {absent} are not among this machine's: {present}")


def _check_link(pair: frozenset[str], link: Link, members: Mapping[str, Member]) -> None:
    for member_id in sorted(pair):
        if member_id not in members:
            there = choices(member_id, tuple(members))
            raise ClusterError(f"a link names {member_id!r}; the cluster has {there}")
    name = " - ".join(sorted(pair))
    if len(pair) != 2:
        raise ClusterError(f"link {name}: it joins two different devices")
    check_link(name, link.latency_s, link.bandwidth_Bps)
