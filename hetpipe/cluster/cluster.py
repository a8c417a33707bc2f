"""Cluster: the devices a model may use, the cores and speeds they get, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Member:
    """One device of a cluster. `id` is unique in the cluster; `device` is a `DeviceInfo.id`."""

    id: str
    device: str
    cores: tuple[int, ...] = ()  # CPU cores its worker is pinned to; empty: not pinned
    speed: float = 1.0  # emulated: 0.5 stretches every compute action to twice its time


@dataclass(frozen=True)
class Link:
    """An emulated link, both ways. None: as the transport is."""

    latency_s: float | None = None
    bandwidth_Bps: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Devices in pipeline order, links by pair of ids (either order)."""

    members: tuple[Member, ...]
    links: dict[frozenset[str], Link] = field(default_factory=dict)
    transport: str = "auto"  # auto | local | shared-memory | distributed
