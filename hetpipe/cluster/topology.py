"""Topologies: the links between the devices of a server, or between servers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hetpipe.errors import ClusterError
from hetpipe.words import choices

SHAPES = ("point-to-point", "switch", "bus", "chain")
DUPLEXES = ("full", "half")


@dataclass(frozen=True)
class Link:
    """The latency and bandwidth of a link, the same in both directions; None: not described. A link
    between attached devices is emulated."""

    latency_s: float | None = None
    bandwidth_Bps: float | None = None


@dataclass(frozen=True)
class Topology:
    """Equal links among ends. An end is a device of one server, or a server of the network.

    "point-to-point": each pair has its own link. "switch": each end has its own link into one
    switch. "bus": all ends share one medium. "chain": neighbours are linked, and a message passes
    every link on its way. Raises `ClusterError` for invalid values.
    """

    latency_s: float | None = None  # of a link, or of the way through the switch
    bandwidth_Bps: float | None = None
    shape: str = "point-to-point"
    duplex: str = "full"  # "half": both directions of a link share its bandwidth, as on any bus
    all_reduce_Bps: float | None = None  # of sums over replicas; None: as `bandwidth_Bps`

    def __post_init__(self) -> None:
        for key, value, known in (("shape", self.shape, SHAPES), ("duplex", self.duplex, DUPLEXES)):
            if value not in known:
                raise ClusterError(f"no {key} {value!r}; {choices(value, known)}")
        check_link("of a topology", self.latency_s, self.bandwidth_Bps)
        check_link("of a topology", None, self.all_reduce_Bps)

    @property
    def sum_speed(self) -> float:
        """The bandwidth of sums over replicas, relative to the bandwidth of messages."""
        if self.all_reduce_Bps is None or self.bandwidth_Bps is None:
            return 1.0
        return self.all_reduce_Bps / self.bandwidth_Bps

    def link(self, one: int, other: int) -> Link:
        """Return the link that a message uses between the ends with these numbers."""
        if self.shape != "chain" or self.latency_s is None:
            return Link(self.latency_s, self.bandwidth_Bps)
        return Link(abs(one - other) * self.latency_s, self.bandwidth_Bps)

    def media(self, name: str, ends: Sequence[str], one: int, other: int) -> tuple[str, ...]:
        """Return the media that a message occupies; their names begin with `name`."""
        if self.shape == "bus":
            return (name,)
        if self.shape == "switch":
            up, down = (" up", " down") if self.duplex == "full" else ("", "")
            return f"{name}: {ends[one]}{up}", f"{name}: {ends[other]}{down}"
        step = 1 if one < other else -1
        stops = range(one, other + step, step) if self.shape == "chain" else (one, other)
        return tuple(f"{name}: {self._between(ends, *hop)}" for hop in pairwise(stops))

    def _between(self, ends: Sequence[str], one: int, other: int) -> str:
        if self.duplex == "full":
            return f"{ends[one]} > {ends[other]}"
        return f"{ends[min(one, other)]} - {ends[max(one, other)]}"


@dataclass(frozen=True)
class Server:
    """A machine with devices. `inside` is the topology of their links; None: unknown.

    If it is a host, its agent offers the devices."""

    name: str
    inside: Topology | None = None
    is_host: bool = False


class _Meeting(NamedTuple):
    """The topology that links two devices, and the numbers of the two ends in this topology."""

    topology: Topology | None
    name: str
    ends: tuple[str, ...]
    one: int
    other: int
    alone: bool  # whether each of the two ends is a single device


class Layout:
    """The places of devices in groups: servers, or single devices without a server.

    `devices` are pairs of a device's id and its server's name; the name is empty for a device
    without a server. A message between groups occupies only the network, and no medium inside a
    server.
    """

    def __init__(
        self,
        devices: Iterable[tuple[str, str]],
        servers: Sequence[Server],
        network: Topology | None,
    ) -> None:
        inside = {server.name: server.inside for server in servers}
        groups: dict[tuple[str, str], list[str]] = {}
        for id, server in devices:
            groups.setdefault((server, "" if server else id), []).append(id)
        self.groups = tuple(map(tuple, groups.values()))
        self._names = tuple(f"server {server}" if server else id for server, id in groups)
        self._inside = [inside.get(server) for server, _ in groups]
        self._network = network
        self._places = {
            id: (group, place)
            for group, ids in enumerate(self.groups)
            for place, id in enumerate(ids)
        }

    @property
    def describes_all(self) -> bool:
        """Whether the bandwidth of every link is known."""
        several = [inside for inside, ids in zip(self._inside, self.groups, strict=True) if ids[1:]]
        needed = [*several, self._network] if len(self.groups) > 1 else several
        return all(topology is not None and topology.bandwidth_Bps for topology in needed)

    def link(self, one: str, other: str) -> Link:
        """Return the link between two different devices, as servers and network describe it."""
        meeting = self._meeting(one, other)
        if meeting.topology is None:
            return Link()
        return meeting.topology.link(meeting.one, meeting.other)

    def sum_speed(self, one: str, other: str) -> float:
        """Return the bandwidth of sums over replicas, relative to the bandwidth of messages."""
        topology = self._meeting(one, other).topology
        return 1.0 if topology is None else topology.sum_speed

    def way(self, one: str, other: str) -> tuple[str, ...]:
        """Return the shared media that a message from one device to another occupies."""
        meeting = self._meeting(one, other)
        topology = meeting.topology
        if topology is None:
            return ()
        if meeting.alone and topology.shape == "point-to-point" and topology.duplex == "full":
            return ()
        return topology.media(meeting.name, meeting.ends, meeting.one, meeting.other)

    def missing_table(self, one: str, other: str) -> str:
        """Name the entry of a cluster file that would describe the link between two devices."""
        group, other_group = self._places[one][0], self._places[other][0]
        return "a [network]" if group != other_group else f"`inside` to {self._names[group]}"

    def levels(self) -> tuple[tuple[int, float], ...]:
        """Return, by level, the number of components and the bandwidth (B/s) between them.

        The innermost level comes first. Raises `ClusterError` if the servers differ, or if a
        level's bandwidth is unknown.
        """
        sizes = list(map(len, self.groups))
        size, levels = sizes[0], []
        for name, other in zip(self._names, sizes, strict=True):
            if other != size:
                raise ClusterError(
                    f"the cluster is irregular: {self._names[0]} has {size} devices and {name} "
                    f"{other}; levels need equal numbers"
                )
        if size > 1:
            levels.append((size, self._bandwidth_inside()))
        if len(sizes) > 1:
            levels.append((len(sizes), _known_Bps(self._network, "between servers", "a [network]")))
        return tuple(levels) or ((1, math.inf),)

    def _meeting(self, one: str, other: str) -> _Meeting:
        (group, place), (other_group, other_place) = self._places[one], self._places[other]
        if group == other_group:
            name, inside = self._names[group], self._inside[group]
            return _Meeting(inside, name, self.groups[group], place, other_place, True)
        alone = len(self.groups[group]) == len(self.groups[other_group]) == 1
        return _Meeting(self._network, "network", self._names, group, other_group, alone)

    def _bandwidth_inside(self) -> float:
        """Return the bandwidth (B/s) inside the servers. Raises `ClusterError` if they differ."""
        known = [
            _known_Bps(topology, f"inside {name}", "`inside` to it")
            for name, topology in zip(self._names, self._inside, strict=True)
        ]
        for name, bandwidth_Bps in zip(self._names, known, strict=True):
            if bandwidth_Bps != known[0]:
                raise ClusterError(
                    f"the cluster is irregular: {self._names[0]} has {known[0]:g} B/s inside and "
                    f"{name} {bandwidth_Bps:g} B/s; levels need equal bandwidths"
                )
        return known[0]


def check_link(name: str, latency_s: float | None, bandwidth_Bps: float | None) -> None:
    """Raise `ClusterError` for an impossible latency or bandwidth."""
    if bandwidth_Bps is not None and not 0 < bandwidth_Bps < math.inf:
        why = f"bandwidth is {bandwidth_Bps} B/s, must be above 0 and finite"
        raise ClusterError(f"link {name}: {why}")
    if latency_s is not None and not 0 <= latency_s < math.inf:
        why = f"latency is {latency_s} s, must be 0 or more and finite"
        raise ClusterError(f"link {name}: {why}")


def _known_Bps(topology: Topology | None, where: str, missing: str) -> float:
    if topology is None or topology.bandwidth_Bps is None:
        raise ClusterError(f"nothing describes the bandwidth {where}; add {missing}")
    return topology.bandwidth_Bps
