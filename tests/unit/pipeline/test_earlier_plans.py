"""A pipeline keeps the plan of an earlier start unless another plan is clearly faster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.pipeline.earlier import EarlierPlans
from hetpipe.pipeline.options import PlanOptions
from hetpipe.pipeline.planning import Planning
from hetpipe.plan.plan import Plan

LAYERS = [f"layer{n}" for n in range(10)]
MEMBERS = ["m0", "m1"]
CLUSTER = Cluster.with_ids(MEMBERS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))


def table(samples: int, factor: float, layer_s: float = 1.0) -> CostTable:
    """Return ten layers that take `layer_s` on the first device and `factor * layer_s` on the
    second."""
    rows = {
        member: DeviceCost((LayerCost(time_s, time_s, 0.0),) * len(LAYERS), 0.0, 2**40, member)
        for member, time_s in zip(MEMBERS, (layer_s, factor * layer_s), strict=True)
    }
    links = {(a, b): LinkCost(0.0, 1e12) for a in MEMBERS for b in MEMBERS if a != b}
    nbytes = tuple(LayerBytes(name, 100, 0, 0, 8) for name in LAYERS)
    return CostTable("case", samples, nbytes, rows, links)


def plan_with(
    factor: float, model: str = "a", schedule: str = "1f1b", members: Sequence[str] = MEMBERS
) -> Plan:
    """Return the plan of a start at which the second device takes `factor` times as long."""
    planning = Planning(
        "case", LAYERS, Cluster.with_ids(members), 8,
        lambda sizes: {size: table(size, factor) for size in sizes},
        earlier=EarlierPlans({"model": model}),
    )  # fmt: skip
    return planning.choose(PlanOptions(schedule=schedule, microbatches=4))[0]


def test_a_plan_of_more_members_is_not_kept() -> None:
    """A member that has become a spare gets no layers."""
    assert plan_with(1.0).all_devices == ("m0", "m1")
    assert plan_with(1.0, members=["m1"]).all_devices == ("m1",)


def test_a_small_change_keeps_the_plan_with_new_times() -> None:
    first = plan_with(1.0)
    again = plan_with(1.04)
    assert (again.cuts, again.devices) == (first.cuts, first.devices)
    n = first.devices.index("m1")
    assert again.stages[n].forward_s == pytest.approx(1.04 * first.stages[n].forward_s)


def test_a_large_change_makes_a_new_plan_which_then_stays() -> None:
    first = plan_with(1.0)
    changed = plan_with(3.0)
    assert changed.cuts == plan_with(3.0, model="b").cuts != first.cuts
    assert plan_with(3.04).cuts == changed.cuts


def test_other_options_have_other_plans() -> None:
    plan_with(1.0)
    assert plan_with(1.0, schedule="gpipe").schedule == "gpipe"


def test_shares_of_a_replicated_plan_stay_too() -> None:
    """Other shares of a mini-batch would need other programs."""

    def plan(factor: float) -> Plan:
        planning = Planning(
            "case", LAYERS, CLUSTER, 64, lambda sizes: {s: table(s, factor, s) for s in sizes},
            whole_batch_statistics=False, earlier=EarlierPlans({"model": "a"}),
        )  # fmt: skip
        return planning.choose(PlanOptions())[0]

    first = plan(1.0)
    assert first.schedule == "data-parallel"
    assert first.stages[0].shares[0] == first.stages[0].shares[1]
    again = plan(1.04)
    assert again.stages[0].shares == first.stages[0].shares
    assert again.step_s == pytest.approx(1.04 * first.step_s, rel=0.02)
    assert plan(3.0).stages[0].shares != first.stages[0].shares


def test_keeping_a_plan_measures_no_other_sizes() -> None:
    """Modelled times of other sizes prompt a measurement only if they promise a clear gain."""
    measured: list[int] = []

    def tables(sizes: Sequence[int], factor: float) -> dict[int, CostTable]:
        measured.extend(set(sizes) - set(measured))
        return {size: table(size, factor, 0.1 * size + 0.02) for size in sizes}

    def plan(factor: float) -> tuple[Plan, list[int]]:
        known = list(measured)
        planning = Planning(
            "case", LAYERS, CLUSTER, 64, lambda sizes: tables(sizes, factor),
            stored=lambda sizes: {size: table(size, 1.0) for size in sizes if size in known},
            earlier=EarlierPlans({"model": "a"}),
        )  # fmt: skip
        return planning.choose(PlanOptions(schedule="1f1b"))[0], measured[len(known) :]

    first, sizes = plan(1.0)
    assert len(sizes) == 3, "the ends, and the best size between"
    best = sizes[-1]
    assert first.mini_batch == best * first.microbatches
    again, sizes = plan(1.04)
    assert (again.microbatches, again.cuts, sizes) == (first.microbatches, first.cuts, [])
    changed, sizes = plan(30.0)
    assert changed.cuts != first.cuts
