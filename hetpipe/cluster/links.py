"""The costs of all links that a cluster describes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import permutations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import LinkCost


class ClusterLinks(Mapping[tuple[str, str], LinkCost]):
    """The costs of the links of a cluster, by (source, target) ids, each computed when it is used.

    A cluster of 8,192 boards has 67 million links, and a plan uses few of them.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[str, str], LinkCost] = {}

    def __getitem__(self, ends: tuple[str, str]) -> LinkCost:
        if ends not in self._known:
            if ends not in self:
                raise KeyError(ends)
            link = self._cluster.link(*ends)
            bandwidth_Bps = math.inf if link.bandwidth_Bps is None else link.bandwidth_Bps
            self._known[ends] = LinkCost(
                link.latency_s or 0.0, bandwidth_Bps, "modelled", self._cluster.sum_speed(*ends)
            )
        return self._known[ends]

    def __contains__(self, ends: object) -> bool:
        known = self._cluster.is_member
        return isinstance(ends, tuple) and ends[0] != ends[1] and all(map(known, ends))

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return permutations(self._cluster.ids, 2)

    def __len__(self) -> int:
        count = len(self._cluster.ids)
        return count * (count - 1)


def link_costs(cluster: Cluster) -> ClusterLinks:
    """Return the cost of the link between every two members, by (source, target) ids.

    Raises `ClusterError` for a board whose link to another member has no described bandwidth.
    """
    costs = ClusterLinks(cluster)
    if not cluster.describes_all_links:
        for ends in costs:
            costs[ends]
    return costs
