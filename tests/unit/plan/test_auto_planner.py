"""The planner auto, compared with all plans of small clusters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from joint_cases import MINI_BATCH, best_step_s, joint_case, tight_case
from tables import MIB, make_table

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.errors import PlanError
from hetpipe.plan.planners.choice import PLANNERS, plan
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.words import words

OPTIONS = PlannerOptions(MINI_BATCH)
UNKNOWN = ("exact", "data-parallel"), ("pipedream", "data-parallel"), ("dapple", "pipedream")
"""Planners, each with a schedule that they cannot plan."""


@pytest.mark.wide
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_the_plan_is_within_2_percent_of_the_best_plan(first):
    """Simulate all orders, subsets, replicas, cuts, schedules, depths and sizes."""
    for seed in range(first, first + 10):
        tables, cluster = joint_case(seed)
        best_s = best_step_s(tables, cluster, OPTIONS)
        if best_s == float("inf"):
            with pytest.raises(PlanError):
                plan(tables, cluster, OPTIONS)
            continue
        chosen = plan(tables, cluster, OPTIONS)
        assert chosen.step_s <= 1.02 * best_s
        assert chosen.step_s >= best_s * (1 - 1e-9), "brute force has missed a plan"
        assert chosen.lower_bound_s is not None
        assert chosen.lower_bound_s <= best_s * (1 + 1e-9)


@pytest.mark.slow
def test_the_plan_is_the_best_if_memory_is_scarce():
    """Compare with all cuts, depths, micro-batch sizes and recompute; memory forbids some of
    them."""
    options, bound = PlannerOptions(MINI_BATCH, recompute=True), 0
    for seed in (*range(8), 14, 18):
        tables, cluster = tight_case(seed)
        best_s = best_step_s(tables, cluster, options)
        if best_s == float("inf"):
            with pytest.raises(PlanError, match="bytes are missing"):
                plan(tables, cluster, options)
            continue
        chosen = plan(tables, cluster, options)
        assert chosen.step_s == pytest.approx(best_s, rel=1e-9), seed
        plenty = {
            size: replace(
                table,
                devices={
                    id: replace(cost, memory_nbytes=1 << 50) for id, cost in table.devices.items()
                },
            )
            for size, table in tables.items()
        }
        bound += chosen.step_s > plan(plenty, cluster, options).step_s * (1 + 1e-9)
    assert bound > 3, "memory should decide some of the plans"


def test_the_depth_is_one_if_nothing_deeper_fits():
    """Two layers on two devices: the only cut fits only with one micro-batch in flight."""
    tables = {
        size: make_table({"a": 1.0, "b": 1.0}, 2, samples=size, memory=21 * MIB, saved=8 * MIB)
        for size in (4, 8)
    }
    cluster = Cluster((Member("a", "made:up:0"), Member("b", "made:up:1")))
    chosen = plan(tables, cluster, PlannerOptions(16, (4,), replicas=False))
    assert (chosen.cuts, chosen.in_flight) == ((1,), (1, 1))


def test_a_plan_without_replicas_on_request():
    tables, cluster = joint_case(3)
    chosen = plan(tables, cluster, PlannerOptions(MINI_BATCH, replicas=False))
    assert max(chosen.replicas) == 1


def test_the_clusters_order_is_kept_on_request():
    for seed in range(12):
        tables, cluster = joint_case(seed)
        chosen = plan(tables, cluster, PlannerOptions(MINI_BATCH, free_order=False))
        places = [cluster.ids.index(stage.devices[0]) for stage in chosen.stages]
        assert places == sorted(places)


def test_recompute_if_nothing_else_fits():
    """The memory holds weights and the stages' inputs, but not all tensors that forwards save."""
    tables = {
        size: make_table({"a": 1.0, "b": 1.0}, samples=size, memory=70 * MIB, saved=10 * MIB)
        for size in (4, 8)
    }
    cluster = Cluster((Member("a", "made:up:0"), Member("b", "made:up:1")))
    options = PlannerOptions(16, schedules=("gpipe",))  # all micro-batches in flight
    with pytest.raises(PlanError, match="bytes are missing"):
        plan(tables, cluster, options)
    chosen = plan(tables, cluster, replace(options, recompute=True))
    assert chosen.recompute
    assert all(stage.memory_nbytes <= 70 * MIB for stage in chosen.stages)
    # a backward repeats its forward: 1 s + 2 s for each of 4 layers
    assert [stage.backward_s for stage in chosen.stages] == [
        pytest.approx(3 * stage.forward_s) for stage in chosen.stages
    ]


def test_an_unknown_planner_is_refused():
    tables, cluster = joint_case(0)
    with pytest.raises(PlanError, match="no planner 'best'; known: auto, bapipe"):
        plan(tables, cluster, OPTIONS, "best")


def test_a_member_without_costs_is_refused():
    tables, cluster = joint_case(0)
    more = Cluster((*cluster.members, Member("stranger", "made:up:9")))
    with pytest.raises(PlanError, match="no costs for stranger at micro-batches of 1"):
        plan(tables, more, OPTIONS)


@pytest.mark.parametrize("planner", ["auto", "exact", "pipedream", "bapipe"])
def test_the_error_of_a_stream_names_the_missing_bytes_and_a_cure(planner):
    """Each stage needs two versions of 8 MiB of weights, and 2 mini-batches of 16 samples in
    flight."""
    tables = {
        size: make_table({"a": 1.0, "b": 1.0}, samples=size, memory=180 * MIB, saved=10 * MIB)
        for size in (8, 16)
    }
    cluster = Cluster((Member("a", "made:up:0"), Member("b", "made:up:1")))
    options = PlannerOptions(16, (1,), schedules=("pipedream",), weights="stash", replicas=False)
    if planner == "pipedream":
        options = replace(options, replicas=True)
    need = 4 * 4 * MIB + 4 * MIB + 2 * 4 * 40 * MIB + 2 * 4 * MIB
    lacking = (
        rf"stage 0 .* needs {need} bytes .* {need - 180 * MIB} bytes are missing; it fits with"
    )
    with pytest.raises(PlanError, match=lacking):
        plan(tables, cluster, options, planner)


def test_a_stream_refuses_divided_mini_batches():
    tables = {4: make_table({"a": 1.0, "b": 1.0}, samples=4)}
    cluster = Cluster((Member("a", "made:up:0"), Member("b", "made:up:1")))
    options = PlannerOptions(16, schedules=("pipedream",))
    with pytest.raises(
        PlanError, match=r"does not cut a mini-batch, .* allow 1, with costs for 16"
    ):
        plan(tables, cluster, options, "exact")


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    "schedules", [("pipedream",), ("gpipe",), ("1f1b", "pipedream"), ("data-parallel",)]
)
def test_a_plan_has_a_schedule_of_the_options(planner, schedules):
    """With four layers on three devices and free links, replicas are fastest."""
    names = "abc"
    tables = {size: make_table(dict.fromkeys(names, 1.0), 4, samples=size) for size in (1, 4, 12)}
    cluster = Cluster(tuple(Member(name, "made:up:0") for name in names))
    asked = PlannerOptions(12, (1,))
    if planner != "exact":
        assert plan(tables, cluster, asked, planner).schedule == "data-parallel"
    named = replace(asked, schedules=schedules)
    if (planner, *schedules) in UNKNOWN:
        with pytest.raises(PlanError, match=words(schedules)):
            plan(tables, cluster, named, planner)
    else:
        assert plan(tables, cluster, named, planner).schedule in schedules
