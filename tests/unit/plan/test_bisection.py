"""The exact partition at scale, and compared with all partitions of small cases."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from benchmarks.planners import chain

from hetpipe.errors import PlanError
from hetpipe.plan.bisection import Stage, fixed_order
from hetpipe.plan.costs import Objective

CASES = 500


def random_stages(
    seed: int, most_layers: int = 8, most_devices: int = 4
) -> tuple[list[Stage], int, int]:
    """Return stages on unlike devices, with transfers, and their numbers of layers and devices.

    Some devices lack the memory for all layers, or cannot run some layers.
    """
    draw = random.Random(seed)
    layers = draw.randint(1, most_layers)
    devices = draw.randint(1, min(most_devices, layers))
    bounded = draw.random() < 0.5
    cut = np.array(
        [0.0, *(draw.uniform(0, 1) * draw.choice([0, 1, 3]) for _ in range(layers - 1)), 0.0]
    )
    base_s = [draw.uniform(0.1, 2.0) for _ in range(layers)]
    nbytes = np.cumsum([0.0, *(draw.uniform(0.5, 2.0) for _ in range(layers))])
    ahead, back = ([draw.uniform(0.1, 1.0) for _ in range(devices + 1)] for _ in range(2))
    speeds = [2 ** draw.uniform(-2, 2) for _ in range(devices)]
    own_s = [np.cumsum([0.0, *(t * draw.uniform(0.7, 1.3) / s for t in base_s)]) for s in speeds]
    blocked = [draw.randrange(layers) if draw.random() < 0.2 else layers for _ in range(devices)]
    capacity = [
        nbytes[-1] * draw.uniform(1.0, 2.2) / devices if bounded else math.inf
        for _ in range(devices)
    ]
    stages = [
        Stage(
            own_s[n], 0.1 * (n % 2), cut * (back[n] if n else 0.0),
            cut * (ahead[n] if n + 1 < devices else 0.0),
            np.array([blocked[n] if c <= blocked[n] else layers for c in range(layers + 1)]),
            nbytes, 0.2 * cut, capacity[n],
        )
        for n in range(devices)
    ]  # fmt: skip
    return stages, layers, devices


def all_partitions(stages: Sequence[Stage], layers: int) -> Iterator[list[tuple[Stage, int, int]]]:
    for cuts in combinations(range(1, layers), len(stages) - 1):
        yield list(zip(stages, (0, *cuts), (*cuts, layers), strict=True))


def can_run(stage: Stage, lo: int, hi: int) -> bool:
    need = stage.nbytes[hi] - stage.nbytes[lo] + stage.buffers[lo] + stage.buffers[hi]
    return bool(stage.blocked[lo] >= hi and need <= stage.capacity)


@pytest.mark.parametrize("objective", ["sum", "max"])
@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_no_partition_has_a_faster_slowest_stage(first, objective):
    solved = 0
    for seed in range(first, first + 50):
        stages, layers, _ = random_stages(seed)
        best_s = min(
            (
                max(stage.seconds(lo, hi, objective) for stage, lo, hi in partition)
                for partition in all_partitions(stages, layers)
                if all(can_run(*placed) for placed in partition)
            ),
            default=math.inf,
        )
        answer = fixed_order(stages, objective)
        if answer is None:
            assert best_s == math.inf
            continue
        slowest_s, cuts = answer
        solved += 1
        assert slowest_s == pytest.approx(best_s, rel=1e-9)
        placed = list(zip(stages, (0, *cuts), (*cuts, layers), strict=True))
        assert all(lo < hi and can_run(stage, lo, hi) for stage, lo, hi in placed)
        assert slowest_s == max(stage.seconds(lo, hi, objective) for stage, lo, hi in placed)
    assert solved > 20, "most cases have a partition"


def test_prefix_sums_far_above_a_stage():
    """The slow device's stage is one layer, smaller than the last digits of the prefix sums."""
    layers = 20_000
    none, able = np.zeros(layers + 1), np.full(layers + 1, layers)
    for seed in range(4):
        base_s = np.random.default_rng(seed).uniform(0.05, 0.2, layers)
        own_s = [np.concatenate(([0.0], np.cumsum(base_s * scale))) for scale in (0.01, 1000, 0.01)]
        stages = [Stage(own_s[n], 0.01, none, none, able, none, none, math.inf) for n in range(3)]
        ends = np.arange(1, layers - 1)
        optimum_s = np.maximum.reduce(
            [
                own_s[0][ends],
                own_s[1][ends + 1] - own_s[1][ends],
                own_s[2][-1] - own_s[2][ends + 1],
            ]
        ).min()
        answer = fixed_order(stages, "sum")
        assert answer is not None
        assert answer[0] == pytest.approx(optimum_s + 0.01, rel=1e-9)


def test_invalid_stages_are_refused():
    stages, layers, _ = random_stages(1)
    with pytest.raises(PlanError, match=f"has 1 nbytes and {layers + 1} compute_s"):
        replace(stages[0], nbytes=np.zeros(1))
    for name, ill in [("compute_s", -1.0), ("leave_s", math.nan), ("compute_s", math.inf)]:
        with pytest.raises(PlanError, match=f"has {name} that are negative, falling or infinite"):
            replace(stages[0], **{name: np.full(layers + 1, ill)})
    with pytest.raises(PlanError, match="nbytes that are negative, falling"):
        replace(stages[0], nbytes=np.arange(layers + 1)[::-1])
    with pytest.raises(PlanError, match=r"stages of \[\] layers: give one or more"):
        fixed_order([], "sum")
    other = next(each for each, count, _ in map(random_stages, range(2, 99)) if count != layers)
    with pytest.raises(PlanError, match=r"stages of \[\d, \d\] layers"):
        fixed_order([stages[0], other[0]], "sum")


def slowest_stage_s(
    stages: Sequence[Stage], layers: int, devices: int, objective: Objective
) -> float:
    """Return the time of the slowest stage, minimised by dynamic programming over stages and
    cuts."""
    least_s = np.full((devices + 1, layers + 1), math.inf)
    least_s[0, 0] = 0.0
    for n, stage in enumerate(stages):
        for lo, hi in combinations(range(layers + 1), 2):
            if can_run(stage, lo, hi):
                slowest_s = max(least_s[n, lo], stage.seconds(lo, hi, objective))
                least_s[n + 1, hi] = min(least_s[n + 1, hi], slowest_s)
    return float(least_s[-1, -1])


@pytest.mark.parametrize("objective", ["sum", "max"])
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_many_layers_match_the_recurrence(first, objective):
    for seed in range(first, first + 30):
        case = random_stages(seed, 30, 6)
        answer = fixed_order(case[0], objective)
        slowest_s = math.inf if answer is None else answer[0]
        assert slowest_s == pytest.approx(slowest_stage_s(*case, objective), rel=1e-9)


@pytest.mark.parametrize("objective", ["sum", "max"])
@pytest.mark.parametrize("room", [1.3, 2.2])
def test_twelve_devices_with_little_memory(room, objective):
    stages = chain(60, 12, room)
    answer = fixed_order(stages, objective)
    assert answer is not None
    assert answer[0] == pytest.approx(slowest_stage_s(stages, 60, 12, objective), rel=1e-9)


def test_more_devices_than_layers():
    assert fixed_order(chain(8, 12), "sum") is None


@pytest.mark.parametrize("objective", ["sum", "max"])
def test_many_layers_match_the_dynamic_programme(objective):
    """Compare with `hetpipe.plan.partition`, which accepts any matrices of costs."""
    from hetpipe.plan.partition import bottleneck, exact

    draw = np.random.default_rng(3)
    layers, devices = 120, 9
    cut = np.concatenate(([0.0], draw.uniform(0, 0.5, layers - 1), [0.0]))
    nbytes = np.concatenate(([0.0], np.cumsum(draw.uniform(0.5, 2, layers))))
    stages = []
    for n in range(devices):
        own_s = np.cumsum([0.0, *(draw.uniform(0.5, 2, layers) / 2 ** draw.uniform(-1, 1))])
        stages.append(
            Stage(
                own_s, 0.01, cut * (n > 0), cut * (n < devices - 1),
                np.full(layers + 1, layers), nbytes, 0.1 * cut, nbytes[-1] * 0.16,
            )
        )  # fmt: skip
    matrices = [
        np.array(
            [
                [
                    stage.seconds(lo, hi, objective)
                    if lo < hi and can_run(stage, lo, hi)
                    else math.inf
                    for hi in range(layers + 1)
                ]
                for lo in range(layers + 1)
            ]
        )
        for stage in stages
    ]
    cuts, answer = exact(matrices), fixed_order(stages, objective)
    assert cuts is not None
    assert answer is not None
    assert answer[0] == pytest.approx(bottleneck(matrices, cuts), rel=1e-9)
