"""The benchmarks of planners and simulator, at tiny sizes: people read their figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import accuracy, planners, simulator
from benchmarks.accuracy import Measured, cluster_of, rank_correlation


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_schedule_is_timed_part_by_part(name: str) -> None:
    cost = simulator.cost_of(name, 3, 4, 3)
    assert cost.actions == 3 * 4 * (2 + (name == "zb-h1")) + 2 * 2 * 2 * 4 + 3
    assert min(cost[1:]) >= 0.0


def test_every_planner_of_the_bench_plans() -> None:
    for case in (planners.fixed(20, 4), planners.dapple(8, 2, 2), planners.auto(6, 3)):
        assert case() is not None


def test_growth_is_drawn_with_its_exponent(tmp_path: Path) -> None:
    sizes = (10, 100, 1000)
    assert planners.exponent(sizes, [size**1.5 for size in sizes]) == pytest.approx(1.5)
    planners.draw({"layers": (sizes, (1.0, 2.0, 4.0))}, tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text()


def test_ranks() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert rank_correlation([1, 2, 3, 4], [40, 30, 20, 10]) == -1
    assert rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]) == pytest.approx(0.8)


def test_an_error_is_the_median_of_pairs_of_steps() -> None:
    row = Measured(
        "paced", "m", 2, 1, "auto", "1f1b", 4, (1,), 1.0, (1.1, 2.0, 0.9), (1.0, 2.0, 1.0)
    )
    assert row.error == pytest.approx(0.0)
    assert row.measured_s == row.corrected_s == 1.0


def test_held_back_workers_share_cores_only_where_speeds_leave_room() -> None:
    for speeds in accuracy.CLUSTERS["held-back"]:
        cluster = cluster_of([("numpy:cpu:0", speed) for _, speed in speeds], 1)
        for member in cluster.members:
            shared = [m.speed for m in cluster.members if set(m.cores) & set(member.cores)]
            assert sum(shared) < 1 or not member.cores
        assert len(cluster.links) == len(speeds) * (len(speeds) - 1) / 2
