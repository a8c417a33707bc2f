"""The planner auto, against all plans of small clusters."""

from __future__ import annotations

import pytest
from joint_cases import MINI_BATCH, best_step_s, joint_case

from hetpipe.errors import PlanError
from hetpipe.plan.planners import plan
from hetpipe.plan.proposal import PlannerOptions

OPTIONS = PlannerOptions(MINI_BATCH)


@pytest.mark.wide
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_it_is_within_2_percent_of_the_best_of_all_plans(first):
    """Orders, subsets, replicas, cuts, schedules, depths and sizes, all of them simulated."""
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


def test_a_plan_without_replicas_where_they_are_not_allowed():
    tables, cluster = joint_case(3)
    chosen = plan(tables, cluster, PlannerOptions(MINI_BATCH, replicas=False))
    assert max(chosen.replicas) == 1


def test_the_clusters_order_where_it_is_fixed():
    for seed in range(12):
        tables, cluster = joint_case(seed)
        chosen = plan(tables, cluster, PlannerOptions(MINI_BATCH, free_order=False))
        places = [cluster.ids.index(stage.devices[0]) for stage in chosen.stages]
        assert places == sorted(places)


def test_recompute_where_nothing_else_fits():
    """Memory for the weights and the inputs of stages, not for all that forwards save."""
    from tables import MIB, make_table

    from hetpipe.cluster.cluster import Cluster, Member

    tables = {
        size: make_table({"a": 1.0, "b": 1.0}, samples=size, memory=60 * MIB, saved=10 * MIB)
        for size in (4, 8)
    }
    cluster = Cluster((Member("a", "made:up:0"), Member("b", "made:up:1")))
    with pytest.raises(PlanError, match="bytes are lacking"):
        plan(tables, cluster, PlannerOptions(16))
    chosen = plan(tables, cluster, PlannerOptions(16, recompute=True))
    assert chosen.recompute
    assert all(stage.memory_nbytes <= 60 * MIB for stage in chosen.stages)
    # a backward has its forward once more: 1 s + 2 s for each of 4 layers
    assert [stage.backward_s for stage in chosen.stages] == [
        pytest.approx(3 * stage.forward_s) for stage in chosen.stages
    ]


def test_an_unknown_planner():
    tables, cluster = joint_case(0)
    with pytest.raises(PlanError, match="no planner 'best'; choose one of auto, bapipe"):
        plan(tables, cluster, OPTIONS, "best")


def test_a_member_without_costs():
    from hetpipe.cluster.cluster import Cluster, Member

    tables, cluster = joint_case(0)
    more = Cluster((*cluster.members, Member("stranger", "made:up:9")))
    with pytest.raises(PlanError, match="no costs for stranger at micro-batches of 1"):
        plan(tables, more, OPTIONS)
