"""Devices of a few types in a free order, compared with all orders and an integer programme."""

from __future__ import annotations

import math
import random
from itertools import combinations, permutations

import numpy as np
import pytest

from hetpipe.errors import PlanError
from hetpipe.plan.planners.exact import DeviceType, free_order


def random_types(draw, layers, most_kinds=3, most=2):
    return [
        DeviceType(
            f"type {kind}",
            draw.randint(0 if kind else 1, most),
            np.array(
                [
                    draw.uniform(0.2, 2.0) * 2 ** draw.uniform(-1, 1)
                    if draw.random() > 0.06
                    else math.inf
                    for _ in range(layers)
                ]
            ),
            draw.choice([0.0, 0.2]),
        )
        for kind in range(draw.randint(1, most_kinds))
    ]


def best_s(types, layers):
    """Return the best slowest stage over all orders of all subsets, and all cuts."""
    devices = [kind for kind, each in enumerate(types) for _ in range(each.count)]
    best = math.inf
    for count in range(1, min(len(devices), layers) + 1):
        for order in set(permutations(devices, count)):
            for cuts in combinations(range(1, layers), count - 1):
                ends = (0, *cuts, layers)
                slowest = 0.0
                for kind, lo, hi in zip(order, ends, ends[1:], strict=False):
                    own = types[kind]
                    slowest = max(slowest, own.overhead_s + own.layers_s[lo:hi].sum())
                best = min(best, slowest)
    return best


@pytest.mark.parametrize("first", range(0, 500, 50))
def test_no_order_is_better(first):
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        layers = draw.randint(1, 6)
        types = random_types(draw, layers)
        answer, optimum_s = free_order(types), best_s(types, layers)
        if answer is None:
            assert optimum_s == math.inf
            continue
        slowest_s, stages = answer
        assert slowest_s == pytest.approx(optimum_s, rel=1e-9)
        assert [stages[0].lo, stages[-1].hi] == [0, layers]
        used = [sum(stage.kind == kind for stage in stages) for kind in range(len(types))]
        assert all(count <= each.count for count, each in zip(used, types, strict=True))


def test_a_type_with_an_overhead_above_the_optimum_is_unused():
    types = [
        DeviceType("quick", 2, np.ones(6)),
        DeviceType("late", 2, np.full(6, 0.5), 5.0),
    ]
    answer = free_order(types)
    assert answer is not None
    assert answer[0] == 3.0
    assert {stage.kind for stage in answer[1]} == {0}


@pytest.mark.parametrize("seed", range(6))
def test_ten_devices_match_an_integer_programme(seed):
    """HiGHS chooses for each device type and run of layers whether they form a stage."""
    optimize = pytest.importorskip("scipy.optimize")
    draw = random.Random(seed)
    layers = 12
    types = [
        DeviceType("a", 4, np.array([draw.uniform(0.5, 2) for _ in range(layers)]), 0.05),
        DeviceType("b", 3, np.array([draw.uniform(0.2, 1) for _ in range(layers)]), 0.1),
        DeviceType("c", 3, np.array([draw.uniform(1.0, 4) for _ in range(layers)])),
    ]
    runs = [
        (k, lo, hi) for k in range(3) for lo in range(layers) for hi in range(lo + 1, layers + 1)
    ]
    times_s = [types[k].overhead_s + types[k].layers_s[lo:hi].sum() for k, lo, hi in runs]

    def is_possible(limit_s):
        allowed = [run for run, time_s in zip(runs, times_s, strict=True) if time_s <= limit_s]
        covers = np.array([[lo <= layer < hi for _, lo, hi in allowed] for layer in range(layers)])
        counts = np.array([[k == kind for k, _, _ in allowed] for kind in range(3)])
        solved = optimize.milp(
            np.zeros(len(allowed)),
            integrality=np.ones(len(allowed)),
            bounds=optimize.Bounds(0, 1),
            constraints=[
                optimize.LinearConstraint(covers.astype(float), 1, 1),
                optimize.LinearConstraint(counts.astype(float), 0, [each.count for each in types]),
            ],
        )
        return solved.success

    answer = free_order(types)
    assert answer is not None
    limits = sorted(set(times_s))
    at = limits.index(min(limits, key=lambda limit_s: abs(limit_s - answer[0])))
    assert is_possible(limits[at] * (1 + 1e-12))
    assert not is_possible(limits[at - 1] * (1 + 1e-12))


def test_prefix_sums_far_above_a_stage():
    """Put one layer on the slow device between two fast ones, smaller than the last digits of
    its sums."""
    layers = 20_000
    for seed in range(4):
        base_s = np.random.default_rng(seed).uniform(0.05, 0.2, layers)
        types = [
            DeviceType("fast", 2, np.append(base_s * 0.01, [math.inf, 0.001])),
            DeviceType("slow", 1, np.append(base_s * 1000, [50.0 + seed / 7, 1000.0])),
        ]
        answer = free_order(types)
        assert answer is not None
        assert answer[0] == pytest.approx(50.0 + seed / 7, rel=1e-9)


def test_unequal_lengths_are_refused():
    types = [DeviceType("a", 1, np.ones(3)), DeviceType("b", 1, np.ones(4))]
    with pytest.raises(PlanError, match="b has 4 layers: give 3 layers"):
        free_order(types)


def test_invalid_numbers_are_refused():
    for ill in (-1.0, math.nan):
        with pytest.raises(PlanError, match=f"a has layers_s {ill}: give 0 or more"):
            DeviceType("a", 1, np.full(3, ill))
    with pytest.raises(PlanError, match="1 types with 0 devices"):
        free_order([DeviceType("a", 0, np.ones(3))])
