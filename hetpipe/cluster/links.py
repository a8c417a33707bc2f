"""The costs of all links that a cluster describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import permutations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import LinkCost

Pair = tuple[str, str]  # the ids of two members: source, target


class ClusterLinks(Mapping[Pair, LinkCost]):
    """The costs of the links of a cluster, by (source, target) ids, each computed when it is used.

    A cluster of 8,192 boards has 67 million links, and a plan uses few of them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._known: dict[Pair, LinkCost] = {}

    def __getitem__(self, ends: Pair) -> LinkCost:
        if ends not in self._known:
            if ends not in self:
                raise KeyError(ends)
            link = self.cluster.link(*ends)
            bandwidth_Bps = math.inf if link.bandwidth_Bps is None else link.bandwidth_Bps
            self._known[ends] = LinkCost(
                link.latency_s or 0.0, bandwidth_Bps, "modelled", self.cluster.sum_speed(*ends)
            )
        return self._known[ends]

    def __contains__(self, ends: object) -> bool:
        if ends in self._known:
            return True
        known = self.cluster.is_member
        return isinstance(ends, tuple) and ends[0] != ends[1] and all(map(known, ends))

    def __iter__(self) -> Iterator[Pair]:
        return permutations(self.cluster.ids, 2)

    def __len__(self) -> int:
        count = len(self.cluster.ids)
        return count * (count - 1)

    @property
    def described_by_servers(self) -> bool:
        """Whether servers and the network alone describe the bandwidths of all links."""
        return not self.cluster.links and self.cluster.describes_all_links


def slowest_pairs(
    cluster: Cluster, links: Mapping[Pair, LinkCost]
) -> tuple[list[Pair], list[Pair]] | None:
    """Return pairs of members inside servers, and between servers, with the slowest links of all
    such pairs. None unless servers and network alone describe the links."""
    if not isinstance(links, ClusterLinks) or not links.described_by_servers:
        return None
    groups = cluster.groups()
    inside = [(group[0], group[-1]) for group in groups if len(group) > 1]
    return inside, [(groups[0][0], groups[-1][0])] if len(groups) > 1 else []


def fastest_links(
    links: Mapping[Pair, LinkCost],
) -> tuple[list[LinkCost], list[LinkCost], int] | None:
    """Return the fastest link of each server and of the network, and the number of devices of the
    largest server. None unless servers and network alone describe the links."""
    if not isinstance(links, ClusterLinks) or not links.described_by_servers:
        return None
    groups = links.cluster.groups()
    inside = [links[group[0], group[1]] for group in groups if len(group) > 1]
    between = [links[groups[0][0], groups[1][0]]] if len(groups) > 1 else []
    return inside, between, max(map(len, groups))


def link_costs(cluster: Cluster) -> ClusterLinks:
    """Return the cost of the link between every two members, by (source, target) ids.

    Raises `ClusterError` for a board whose link to another member has no described bandwidth.
    """
    costs = ClusterLinks(cluster)
    if not cluster.describes_all_links:
        for ends in costs:
            costs[ends]
    return costs
