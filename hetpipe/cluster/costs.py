"""The links of a cluster, as costs for a cost table."""

from __future__ import annotations

import math
from itertools import permutations

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import LinkCost


def link_costs(cluster: Cluster) -> dict[tuple[str, str], LinkCost]:
    """Return the cost of the link between every two members, by (from, to) ids.

    Raises `ClusterError` for two described devices without a link.
    """
    costs = {}
    for here, there in permutations(cluster.ids, 2):
        link = cluster.link(here, there)
        bandwidth_Bps = math.inf if link.bandwidth_Bps is None else link.bandwidth_Bps
        costs[here, there] = LinkCost(
            link.latency_s or 0.0, bandwidth_Bps, "modelled", cluster.sum_speed(here, there)
        )
    return costs
