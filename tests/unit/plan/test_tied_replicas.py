"""Planners never propose replicas that take turns at an end of a shared parameter, which a
schedule without flushes refuses."""

from __future__ import annotations

import random
from bisect import bisect_right
from importlib import import_module
from itertools import permutations

import pytest

from hetpipe.cluster import Cluster, Link, Member
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost, TiedBytes
from hetpipe.errors import PlanError
from hetpipe.plan.proposal import PlannerOptions


def task(seed: int) -> tuple[CostTable, Cluster]:
    """Return random layers, of which the first and the last share a parameter. In most cases the
    memory of a device is too small for the whole model."""
    draw = random.Random(seed)
    count, ids = draw.choice([4, 5, 6]), [f"d{n}" for n in range(draw.choice([3, 4, 5]))]
    inner_nbytes = draw.choice([0, 1000, 3000])
    nbytes = [1000, *[inner_nbytes] * (count - 2), 1000]
    layers = tuple(LayerBytes(f"l{n}", nbytes[n], 0, 10, 8) for n in range(count))
    times_s = [draw.choice([0.1, 1.0, 4.0]) for _ in range(count)]
    costs = tuple(LayerCost(time_s, time_s, 0.01) for time_s in times_s)
    room = int(2 * sum(nbytes) * draw.choice([0.7, 0.9, 1.5]))
    pairs = list(permutations(ids, 2))
    table = CostTable(
        "m", 4, layers, {id: DeviceCost(costs, 0.0, room, id) for id in ids},
        dict.fromkeys(pairs, LinkCost(0.0, 1e6)), 0.0, (TiedBytes("t", 1000, (0, count - 1)),),
    )  # fmt: skip
    members = tuple(Member(id, "numpy:cpu:0") for id in ids)
    links = {frozenset(pair): Link(0.0, 1e6) for pair in pairs}
    return table, Cluster(members, links, "local")


@pytest.mark.parametrize("planner", ["auto", "pipedream"])
def test_no_end_of_a_shared_parameter_has_replicas(planner: str) -> None:
    plan_on = import_module(f"hetpipe.plan.planners.{planner}").plan
    options = PlannerOptions(4, (1,), ("pipedream",), "stash", replicas=True)
    made = 0
    for seed in range(20):
        table, cluster = task(seed)
        try:
            plan = plan_on({4: table}, cluster, options)
        except PlanError:  # this planner has no plan, and says so before a start
            continue
        made += 1
        owner, other = (bisect_right(plan.cuts, layer) for layer in table.tied[0].layers)
        assert owner == other or plan.replicas[owner] == plan.replicas[other] == 1
    assert made >= 10
