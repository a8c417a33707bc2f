"""Invented cost tables for tests."""

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.plan.building import build_plan, costs_of
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import Proposal, Tables

MIB = 1 << 20


def make_table(
    speeds, layers=8, *, samples=4, latency_s=0.0, bandwidth=1e12, memory=1 << 40, domain=None,
    overhead_s=0.0, saved=MIB, tied=(),
):  # fmt: skip
    """Return a table of equal layers: 1 s forward, 2 s backward per 4 samples at speed 1."""
    share = samples / 4
    return CostTable(
        "toy",
        samples,
        tuple(
            LayerBytes(f"l{i}", MIB, 2 * MIB, int(saved * share), int(MIB * share))
            for i in range(layers)
        ),
        {
            name: DeviceCost(
                (LayerCost(share / speed, 2 * share / speed, 0.1 / speed),) * layers,
                0.0, memory, domain or name,
            )
            for name, speed in speeds.items()
        },
        {(a, b): LinkCost(latency_s, bandwidth) for a in speeds for b in speeds if a != b},
        overhead_s,
        tied,
    )  # fmt: skip


def plan_by(tables: Tables, proposal: Proposal, mini_batch: int, weights: str = "flush") -> Plan:
    """Return the plan of a proposal by these tables."""
    return build_plan(proposal, costs_of(tables, proposal), mini_batch, weights)
