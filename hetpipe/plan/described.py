"""Costs of a described cluster in a file: each kind of device once, and no list of links.

A cluster of 8,192 boards has 67 million links, and a few kinds of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.links import ClusterLinks
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import DUPLEXES, SHAPES, Server, Topology
from hetpipe.cost.table import CostTable, DeviceCost
from hetpipe.errors import ClusterError, CostError
from hetpipe.records import Entries, Number, OneOf, Seconds, Source
from hetpipe.words import short, words

KEY = "cluster"
"""The key of the description in a table's JSON. Its `devices` then has one device of each kind."""

MaybeBandwidth = Annotated[float, Number(above=True)] | None


@dataclass(frozen=True)
class _Device:
    """A device with the costs of `like`, another device."""

    id: str
    like: str
    memory_domain: str
    server: str


@dataclass(frozen=True)
class _Topology:
    latency_s: Seconds | None
    bandwidth_Bps: MaybeBandwidth
    shape: Annotated[str, OneOf(SHAPES)]
    duplex: Annotated[str, OneOf(DUPLEXES)]
    all_reduce_Bps: MaybeBandwidth


@dataclass(frozen=True)
class _Server:
    name: str
    inside: _Topology | None


@dataclass(frozen=True)
class _Cluster:
    devices: Annotated[tuple[_Device, ...], Entries(1)]
    servers: tuple[_Server, ...]
    network: _Topology | None


def table_to_json(table: CostTable) -> dict[str, Any]:
    """Return a table as `CostTable.to_json` does; if servers and the network describe all links,
    with this description in the place of the links."""
    links = table.links
    if not isinstance(links, ClusterLinks) or not links.described_by_servers:
        return table.to_json()
    cluster, kinds = links.cluster, dict[DeviceCost, str]()
    devices = []
    for id, cost in table.devices.items():
        like = kinds.setdefault(replace(cost, memory_domain=""), id)
        devices.append(_Device(id, like, cost.memory_domain, cluster.member(id).server))
    shown = {id: table.devices[id] for id in kinds.values()}
    whole_loss = {id: loss for id, loss in table.whole_loss.items() if id in shown}
    kept = replace(table, devices=shown, links={}, whole_loss=whole_loss)
    description = {
        "devices": [asdict(device) for device in devices],
        "servers": [
            {"name": each.name, "inside": each.inside and asdict(each.inside)}
            for each in cluster.servers
        ],
        "network": cluster.network and asdict(cluster.network),
    }
    return kept.to_json() | {KEY: description}


def table_from_json(data: Any, where: str = "") -> CostTable:
    """Return the table of a dict from `table_to_json`; `where` is its file. Raises `CostError`."""
    if not isinstance(data, Mapping) or KEY not in data:
        return CostTable.from_json(data, where)
    table = CostTable.from_json({key: data[key] for key in data if key != KEY}, where)
    source = Source("the cost table", CostError, where)
    described = source.record(_Cluster, data[KEY])
    devices, whole_loss = {}, {}
    for number, device in enumerate(described.devices):
        place = (KEY, "devices", number)
        if device.like not in table.devices:
            why = f"is like {short(device.like)}; the table has {words(table.devices)}"
            raise source.fault(place, why)
        if device.id in devices:
            raise source.fault(place, f"is a second device {short(device.id)}")
        kind = table.devices[device.like]
        devices[device.id] = replace(kind, memory_domain=device.memory_domain)
        if table.whole_loss:
            whole_loss[device.id] = table.whole_loss[device.like]
    members = tuple(Member(each.id, each.id, server=each.server) for each in described.devices)
    servers = tuple(Server(each.name, _topology(each.inside)) for each in described.servers)
    try:
        cluster = Cluster(members, servers=servers, network=_topology(described.network))
    except ClusterError as error:
        raise source.fault((KEY,), f"is impossible: {error}") from error
    return replace(table, devices=devices, links=ClusterLinks(cluster), whole_loss=whole_loss)


def _topology(described: _Topology | None) -> Topology | None:
    return None if described is None else Topology(**vars(described))
