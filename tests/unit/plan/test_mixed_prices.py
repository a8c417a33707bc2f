"""The price of a plan with replicas by a table for the rows of a replica."""

from __future__ import annotations

import pytest

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.plan.building import build_plan, costs_of
from hetpipe.plan.pricing import predict
from hetpipe.plan.proposal import Proposal, nearest_table
from hetpipe.plan.simulation import simulate

MEMBERS = ["m0", "m1", "m2"]


def table(samples: int) -> CostTable:
    """Return layers that take 3 s, and a second for each sample."""
    time_s = 3.0 + samples
    row = DeviceCost((LayerCost(time_s, 2 * time_s, 0.5),) * 6, 0.0, 2**40, "host")
    links = {(a, b): LinkCost(0.0, 1e12) for a in MEMBERS for b in MEMBERS if a != b}
    nbytes = tuple(LayerBytes(f"layer{n}", 100, 50, 8 * samples, 4 * samples) for n in range(6))
    return CostTable("case", samples, nbytes, dict.fromkeys(MEMBERS, row), links)


@pytest.mark.parametrize(
    ("groups", "samples"),
    [((("m0", "m1"), ("m2",)), 4), ((("m0",), ("m1", "m2")), 8)],
)
def test_a_stage_on_one_device_has_all_rows(
    groups: tuple[tuple[str, ...], ...], samples: int
) -> None:
    tables = {size: table(size) for size in (4, 8)}
    proposal = Proposal((4,), groups, "1f1b", 8)
    plan = build_plan(proposal, costs_of(tables, proposal), 64, "flush")
    nearest = nearest_table(tables, plan)
    assert nearest.samples == samples
    assert predict(plan, nearest).total_s == pytest.approx(plan.step_s)
    assert simulate(plan, nearest).step_s == pytest.approx(plan.step_s)
