"""Unmeasured micro-batch sizes: their modelled costs, and the sizes that the planner measures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.between import with_sizes_between
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.pipeline.options import PlanOptions
from hetpipe.pipeline.planning import Planning
from hetpipe.plan.building import replicated_plan
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_plan

LAYERS = [f"layer{n}" for n in range(6)]
MEMBERS = ["m0", "m1"]
CLUSTER = Cluster.with_ids(MEMBERS)
MINI_BATCH = 64


def table(samples: int, fixed_s: float) -> CostTable:
    """Return layers that take `fixed_s` plus a second for each sample."""
    time_s = fixed_s + samples
    row = DeviceCost((LayerCost(time_s, 2 * time_s, 0.5),) * len(LAYERS), 0.0, 2**40, "host")
    links = {(a, b): LinkCost(0.0, 1e12) for a in MEMBERS for b in MEMBERS if a != b}
    nbytes = tuple(LayerBytes(name, 100, 50, 8 * samples, 4 * samples) for name in LAYERS)
    return CostTable("case", samples, nbytes, dict.fromkeys(MEMBERS, row), links)


def plan_and_sizes(
    fixed_s: float, options: PlanOptions, stored: Sequence[int] = ()
) -> tuple[Plan, set[int]]:
    """Return the plan and the sizes measured for it."""
    measured: set[int] = set()

    def tables(sizes: Sequence[int]) -> dict[int, CostTable]:
        measured.update(set(sizes) - set(stored))
        return {size: table(size, fixed_s) for size in sizes}

    planning = Planning(
        "case", LAYERS, CLUSTER, MINI_BATCH, tables,
        stored=lambda sizes: {size: table(size, fixed_s) for size in sizes if size in stored},
    )  # fmt: skip
    return planning.choose(options)[0], measured


def test_times_and_bytes_between_two_sizes_are_interpolated() -> None:
    tables = with_sizes_between({2: table(2, 3.0), 16: table(16, 3.0)}, [1, 2, 4, 8, 16, 32])
    assert sorted(tables) == [2, 4, 8, 16], "nothing is said beyond the measured sizes"
    for size, modelled in tables.items():
        exact = table(size, 3.0)
        assert modelled.samples == size
        assert modelled.layers == exact.layers
        for member in MEMBERS:
            assert modelled.forward_s(member, 0, 6) == pytest.approx(exact.forward_s(member, 0, 6))
            assert modelled.backward_s(member, 0, 6) == pytest.approx(
                exact.backward_s(member, 0, 6)
            )
            assert modelled.update_s(member, 0, 6) == exact.update_s(member, 0, 6)
    labels = {size: one.devices["m0"].label for size, one in tables.items()}
    assert labels == {2: "measured", 4: "modelled", 8: "modelled", 16: "measured"}


def test_a_refused_layer_is_refused_at_all_sizes() -> None:
    never = LayerCost(math.inf, math.inf, 0.0, "no such operator")

    def without(samples: int) -> CostTable:
        one = table(samples, 3.0)
        cost = replace(one.devices["m1"], layers=(never, *one.devices["m1"].layers[1:]))
        return replace(one, devices={**one.devices, "m1": cost})

    between = with_sizes_between({2: without(2), 8: without(8)}, [4])[4]
    assert between.devices["m1"].layers[0] == never
    assert not between.devices["m1"].layers[1].impossible


@pytest.mark.parametrize(
    ("fixed_s", "microbatches", "sizes"),
    [
        (0.0, 32, {2, 16}),  # more micro-batches are always better, so an end is best
        (0.25, 16, {2, 4, 16}),
        (1.0, 8, {2, 8, 16}),
        (30.0, 4, {2, 16}),
    ],
)
def test_only_the_best_intermediate_size_is_measured(
    fixed_s: float, microbatches: int, sizes: set[int]
) -> None:
    plan, measured = plan_and_sizes(fixed_s, PlanOptions(schedule="1f1b"))
    assert plan.microbatches == microbatches
    assert measured == sizes
    assert plan.label == "measured"


def test_stored_costs_count_as_measured() -> None:
    plan, measured = plan_and_sizes(1.0, PlanOptions(schedule="1f1b"), stored=[2, 4, 8, 16])
    assert plan.microbatches == 8
    assert measured == set()


def test_given_cuts_need_one_size() -> None:
    plan, measured = plan_and_sizes(4.0, PlanOptions(cuts=[2]))
    assert (plan.cuts, measured) == ((2,), {16})


def test_the_search_ends_if_the_costs_lack_the_best_size() -> None:
    """Given costs, such as a benchmark's, have only some sizes; the others stay modelled."""
    given = {size: table(size, 1.0) for size in (2, 16)}
    planning = Planning(
        "case", LAYERS, CLUSTER, MINI_BATCH,
        lambda sizes: {size: given[size] for size in sizes if size in given},
    )  # fmt: skip
    plan, _ = planning.choose(PlanOptions(schedule="1f1b"))
    assert plan.microbatches == 8
    assert plan.label == "modelled"


@pytest.mark.parametrize(
    ("known", "replicas", "shares", "measured"),
    [
        ([8], 1, True, []),
        ([4], 2, True, [8]),
        ([8], 2, True, [4]),
        ([8], 2, False, []),
        ([4], 2, False, [8]),
        ([2, 16], 2, True, []),
    ],
)
def test_sizes_that_a_plan_after_a_loss_may_need_are_measured(
    known: list[int], replicas: int, shares: bool, measured: list[int]
) -> None:
    asked: list[int] = []

    def tables(sizes: Sequence[int]) -> dict[int, CostTable]:
        asked.extend(sizes)
        return {size: table(size, 3.0) for size in sizes}

    seen = {size: table(size, 3.0) for size in known}
    both = {size: table(size, 3.0) for size in (4, 8)}
    plan = make_plan(both[8], MEMBERS[:1], mini_batch=MINI_BATCH, microbatches=8)
    if replicas > 1:
        plan = replicated_plan(both, MEMBERS, mini_batch=MINI_BATCH, microbatches=8)
    planning = Planning("case", LAYERS, CLUSTER, MINI_BATCH, tables, seen=seen)
    planning.measure_for_losses(plan, shares)
    assert asked == measured
    assert sorted(planning.seen) == sorted({*known, *measured})
