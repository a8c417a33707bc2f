"""Parts of clusters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from hetpipe.cluster.cluster import Cluster


def without(cluster: Cluster, gone: Collection[str]) -> Cluster:
    """Return a cluster without some members and their links.

    Raises `ClusterError` if none is left.
    """
    members = tuple(member for member in cluster.members if member.id not in gone)
    links = {pair: link for pair, link in cluster.links.items() if pair.isdisjoint(gone)}
    places = {id: place for id, place in cluster.places.items() if id not in gone}
    return replace(cluster, members=members, links=links, places=places)


def with_speed(cluster: Cluster, member: str, speed: float) -> Cluster:
    """Return a cluster whose member has this emulated speed. Raises `ClusterError` for a speed
    above 1, or not above 0."""
    members = tuple(
        replace(other, speed=speed) if other.id == member else other for other in cluster.members
    )
    return replace(cluster, members=members)
