"""Cluster: the devices a model may use, their cores and speeds, and the links between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetpipe.cluster.transports import transport_of
from hetpipe.errors import ClusterError
from hetpipe.sdk.info import DeviceInfo


@dataclass(frozen=True)
class Member:
    """One device of a cluster. `id` is unique in the cluster; `device` is a `DeviceInfo.id`."""

    id: str
    device: str
    cores: tuple[int, ...] = ()  # CPU cores its worker is pinned to; empty: not pinned
    speed: float = 1.0  # at most 1; 0.5 (emulated) doubles the time of every compute action


@dataclass(frozen=True)
class Link:
    """An emulated link, both ways. None: as the transport is."""

    latency_s: float | None = None
    bandwidth_Bps: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices in pipeline order, links by pair of ids (either order).

    A described cluster may be absent: its devices are looked up when their workers start.
    Raises `ClusterError` for values that are invalid in themselves.
    """

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    transport: str = "auto"  # see `hetpipe.cluster.transports`
    places: Mapping[str, str] = field(default_factory=dict, compare=False)  # file:line by member id

    def __post_init__(self) -> None:
        transport_of(self.transport)
        if not self.members:
            raise ClusterError("the cluster has no device; give it one or more")
        for index, member in enumerate(self.members):
            if member.id in self.ids[:index]:
                raise ClusterError(f"two devices have the id {member.id!r}; ids are unique")
            _check_member(member)
        for pair, link in self.links.items():
            _check_link(pair, link, self.ids)

    @property
    def ids(self) -> tuple[str, ...]:
        """The members' ids, in order."""
        return tuple(member.id for member in self.members)

    def member(self, member_id: str) -> Member:
        """The member of that id. Raises `ClusterError`."""
        for member in self.members:
            if member.id == member_id:
                return member
        raise ClusterError(f"no device {member_id!r}; the cluster has {', '.join(self.ids)}")

    def link(self, one: str, other: str) -> Link:
        """The link between two members; without a description, the transport's own."""
        return self.links.get(frozenset((one, other)), Link())

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """A cluster from a TOML file (docs/clusters.md). Raises `ClusterError` with the line."""
        from hetpipe.cluster.file import load

        return load(Path(path))

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


def _check_member(member: Member) -> None:
    if not 0 < member.speed <= 1:  # a device can be held back, not hurried
        raise ClusterError(f"{member.id}: speed is {member.speed}, it must be above 0, at most 1")
    absent = sorted(set(member.cores) - set(available_cores()))
    if absent:
        present = ", ".join(map(str, available_cores()))
        raise ClusterError(f"{member.id}: cores {absent} are not among this machine's: {present}")


def _check_link(pair: frozenset[str], link: Link, ids: Sequence[str]) -> None:
    for member_id in sorted(pair):
        if member_id not in ids:
            raise ClusterError(f"a link names {member_id!r}; the cluster has {', '.join(ids)}")
    name = " - ".join(sorted(pair))
    if len(pair) != 2:
        raise ClusterError(f"link {name}: it joins two different devices")
    if link.bandwidth_Bps is not None and not 0 < link.bandwidth_Bps < math.inf:
        why = f"bandwidth is {link.bandwidth_Bps} B/s, must be above 0 and finite"
        raise ClusterError(f"link {name}: {why}")
    if link.latency_s is not None and not 0 <= link.latency_s < math.inf:
        why = f"latency is {link.latency_s} s, must be 0 or more and finite"
        raise ClusterError(f"link {name}: {why}")
