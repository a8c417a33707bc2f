"""The exact partition at scale, against all partitions of small cases."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest

from hetpipe.plan.bisection import Stage, fixed_order

CASES = 500


def random_stages(seed: int) -> tuple[list[Stage], int, int]:
    """Unlike devices with transfers by link, some without memory for all or with layers that they
    cannot run; half of the cases have stages of 2 or 3 replicas, too."""
    draw = random.Random(seed)
    layers = draw.randint(1, 8)
    devices = draw.randint(1, min(4, layers))
    bounded, replicated = draw.random() < 0.5, draw.random() < 0.5
    cut = np.array(
        [0.0, *(draw.uniform(0, 1) * draw.choice([0, 1, 3]) for _ in range(layers - 1)), 0.0]
    )
    base_s = [draw.uniform(0.1, 2.0) for _ in range(layers)]
    nbytes = np.cumsum([0.0, *(draw.uniform(0.5, 2.0) for _ in range(layers))])
    links = [draw.uniform(0.1, 1.0) for _ in range(devices + 1)]
    speeds = [2 ** draw.uniform(-2, 2) for _ in range(devices)]
    own_s = [np.cumsum([0.0, *(t * draw.uniform(0.7, 1.3) / s for t in base_s)]) for s in speeds]
    blocked = [draw.randrange(layers) if draw.random() < 0.2 else layers for _ in range(devices)]
    capacity = [
        nbytes[-1] * draw.uniform(0.3, 1.2) if bounded else math.inf for _ in range(devices)
    ]
    stages = []
    for first in range(devices):
        for end in range(first + 1, (min(devices, first + 3) if replicated else first + 1) + 1):
            count, group = end - first, range(first, end)
            slowest_s = np.max([own_s[n] for n in group], axis=0)
            stop = min(blocked[n] for n in group)
            stages.append(
                Stage(
                    first, end, slowest_s / count + (count - 1) * 0.05 * nbytes, 0.1 * (first % 2),
                    cut * (links[first] if first else 0.0),
                    cut * (links[end] if end < devices else 0.0),
                    np.array([stop if cut <= stop else layers for cut in range(layers + 1)]),
                    nbytes, 0.2 * cut, min(capacity[n] for n in group),
                )
            )  # fmt: skip
    return stages, layers, devices


def all_partitions(
    stages: Sequence[Stage], device: int, lo: int, devices: int, layers: int
) -> Iterator[list[tuple[Stage, int, int]]]:
    if device == devices:
        if lo == layers:
            yield []
        return
    for stage in (stage for stage in stages if stage.first == device):
        for hi in range(lo + 1, layers + 1):
            for rest in all_partitions(stages, stage.end, hi, devices, layers):
                yield [(stage, lo, hi), *rest]


def can_run(stage: Stage, lo: int, hi: int) -> bool:
    need = stage.nbytes[hi] - stage.nbytes[lo] + stage.buffers[lo] + stage.buffers[hi]
    return bool(stage.blocked[lo] >= hi and need <= stage.capacity)


@pytest.mark.parametrize("objective", ["sum", "max"])
@pytest.mark.parametrize("first", range(0, CASES, 50))
def test_no_partition_has_a_quicker_slowest_stage(first, objective):
    solved = 0
    for seed in range(first, first + 50):
        stages, layers, devices = random_stages(seed)
        best_s = min(
            (
                max(stage.seconds(lo, hi, objective) for stage, lo, hi in partition)
                for partition in all_partitions(stages, 0, 0, devices, layers)
                if all(can_run(*placed) for placed in partition)
            ),
            default=math.inf,
        )
        answer = fixed_order(stages, objective)
        if answer is None:
            assert best_s == math.inf
            continue
        slowest_s, placements = answer
        solved += 1
        assert slowest_s == pytest.approx(best_s, rel=1e-9)
        assert [placements[0].lo, placements[-1].hi] == [0, layers]
        for here, there in pairwise(placements):
            assert (here.hi, here.stage.end) == (there.lo, there.stage.first)
        assert all(can_run(p.stage, p.lo, p.hi) for p in placements)
        assert slowest_s == max(p.stage.seconds(p.lo, p.hi, objective) for p in placements)
    assert solved > 20, "most cases have a partition"


def test_none_below_the_optimum():
    stages, _, _ = random_stages(1)
    answer = fixed_order(stages, "sum")
    assert answer is not None
    assert fixed_order(stages, "sum", below_s=answer[0]) is None
    assert fixed_order(stages, "sum", below_s=2 * answer[0]) is not None


@pytest.mark.parametrize("objective", ["sum", "max"])
def test_many_layers_against_the_dynamic_programme(objective):
    """The same partitions in `hetpipe.plan.exact`, which takes any matrices of costs."""
    from hetpipe.plan.exact import bottleneck, exact

    draw = np.random.default_rng(3)
    layers, devices = 120, 9
    cut = np.concatenate(([0.0], draw.uniform(0, 0.5, layers - 1), [0.0]))
    nbytes = np.concatenate(([0.0], np.cumsum(draw.uniform(0.5, 2, layers))))
    stages = []
    for n in range(devices):
        own_s = np.cumsum([0.0, *(draw.uniform(0.5, 2, layers) / 2 ** draw.uniform(-1, 1))])
        stages.append(
            Stage(
                n, n + 1, own_s, 0.01, cut * (n > 0), cut * (n < devices - 1),
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
