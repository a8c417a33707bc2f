"""PipeDream's planner: its published figures, and a comparison with all plans of small cases."""

import math
import os
import random
import sys
from itertools import combinations
from pathlib import Path
from typing import get_args

import pytest

from hetpipe.cost.pipedream_profile import ChainCosts, read_profile
from hetpipe.errors import CostError, PlanError
from hetpipe.plan.planners.pipedream import (
    Level,
    PipeDreamPlan,
    PipeDreamStage,
    SyncRule,
    data_parallel_s,
    plan_pipedream,
    stage_memory_nbytes,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RULES = get_args(SyncRule)


@pytest.fixture
def data():
    """Return the folder of PipeDream's profiles and of its optimizer's results for them."""
    if not (folder := os.environ.get("HETPIPE_DATA")):
        pytest.skip("HETPIPE_DATA is unset: it names the folder of the published profiles")
    return Path(folder)


def published(data, model):
    return read_profile(data / "profiles" / "pipedream" / f"{model}.txt")


def test_golden_plans(data):
    text = (data / "expected" / "pipedream.toml").read_text(encoding="utf-8")
    golden = tomllib.loads(text)["flat"]
    assert len(golden) >= 5
    for entry in golden:
        chain = published(data, entry["profile"]).without_inputs().chain()
        levels = [Level(entry["workers"], entry["bandwidth_Bps"])]
        planned = plan_pipedream(chain, levels, "published-code")
        assert [stage.replicas for stage in planned.stages] == entry["plan"]
        assert planned.bottleneck_s == pytest.approx(entry["time_ms"] / 1e3, rel=0.005)
        if "data_parallel_ms" in entry:
            parallel_s = data_parallel_s(chain, levels, "published-code")
            assert parallel_s == pytest.approx(entry["data_parallel_ms"] / 1e3, rel=0.005)


QUICK_INSIDE, TWO_SERVERS, PAIRS = (
    ((4, 12.5e9), (4, 3.125e9)),
    ((8, 25e9), (2, 3.125e9)),
    ((2, 6e9), (8, 1.25e9)),
)
"""Count and bandwidth of the two levels, the inner one first: 16 workers each."""


@pytest.mark.parametrize(
    ("model", "levels", "time_ms"),
    [
        ("alexnet", QUICK_INSIDE, 7.2591),
        ("alexnet", TWO_SERVERS, 9.7090),
        ("alexnet", PAIRS, 15.0995),
        ("vgg16", QUICK_INSIDE, 54.6260),
        ("vgg16", TWO_SERVERS, 65.7667),
        ("vgg16", PAIRS, 60.2461),
        ("gnmt", QUICK_INSIDE, 9.9255),
        ("gnmt", TWO_SERVERS, 8.1259),
        ("gnmt", PAIRS, 19.2850),
    ],
)
def test_two_levels_match_the_published_program(data, model, levels, time_ms):
    """Compare with the times that the published program's recurrence gives for these profiles.

    We wrote the recurrence again from the program: a triple loop that also counts the transfer
    from a stage on an inner level to the next stage.
    """
    chain = published(data, model).without_inputs().chain()
    planned = plan_pipedream(chain, [Level(*level) for level in levels], "published-code")
    print(f"{model} on {levels}: {1e5 * planned.bottleneck_s / time_ms - 100:+.3f} %")
    assert planned.bottleneck_s == pytest.approx(time_ms / 1e3, rel=1e-4)
    assert sum(stage.replicas for stage in planned.stages) == 16


def test_resnet50_is_data_parallel_only_by_the_papers_text(data):
    """Check the paper's table 1, with and without Input nodes."""
    profile, levels = published(data, "resnet50"), [Level(16, 3.125e9)]
    for chain in (profile.chain(), profile.without_inputs().chain()):
        planned = plan_pipedream(chain, levels)
        assert planned.stages == (PipeDreamStage(0, len(chain.names) - 1, 16),)
        assert planned.bottleneck_s == pytest.approx(data_parallel_s(chain, levels))


def random_chain(rng, layers):
    times = [tuple(rng.uniform(0.1, 2.0) for _ in range(layers)) for _ in range(2)]
    params, *others = [tuple(rng.randint(0, 9) for _ in range(layers)) for _ in range(3)]
    heavy = tuple(rng.choice((1, 9)) * nbytes for nbytes in params)
    return ChainCosts(tuple(map(str, range(layers))), *times, others[0], heavy, others[1])


def random_levels(rng, depth):
    return [Level(rng.randint(1, 5 if depth == 1 else 3), rng.uniform(3, 30)) for _ in range(depth)]


def compositions(total):
    """Yield all ways to write `total` as a sum of ordered positive parts."""
    for parts in range(1, total + 1):
        for ends in combinations(range(1, total), parts - 1):
            yield [hi - lo for lo, hi in zip((0, *ends), (*ends, total), strict=True)]


def sync_s(rule, compute_s, params, replicas, bandwidth_Bps, sharing):
    """Return a replicated stage's time, by the paper's text or by the published code.

    By the published code `sharing` devices of each copy share the sum of its gradients.
    """
    if rule == "text":
        return max(compute_s, 2 * (replicas - 1) / replicas * params / bandwidth_Bps) / replicas
    sum_s = 4 * (replicas - 1) / replicas * params / bandwidth_Bps / sharing
    return (compute_s + sum_s) / replicas


def all_plans(chain, levels, rule, lo, hi, copies=1):
    """Yield time and stages of every partition of layers lo..hi - 1 and every replication."""
    if not levels:
        compute_s = sum(chain.forward_s[lo:hi]) + sum(chain.backward_s[lo:hi])
        yield compute_s, (PipeDreamStage(lo, hi - 1, copies),)
        return
    *inner, level = levels
    for counts in compositions(level.count):
        for ends in combinations(range(lo + 1, hi), len(counts) - 1):
            joined = [(0.0, ())]
            cuts = zip((lo, *ends), (*ends, hi), counts, strict=True)
            for first, last, count in cuts:
                transfer_s = 0.0
                if first > lo:
                    sharing = count if rule == "published-code" else 1
                    transfer_s = 2 * chain.cut_nbytes[first - 1] / level.bandwidth_Bps / sharing
                params = sum(chain.params_nbytes[first:last])
                inside = inner[-1].count if inner and first == lo else 1
                joined = [
                    (
                        max(
                            slowest_s,
                            transfer_s,
                            sync_s(rule, time_s, params, count, level.bandwidth_Bps, inside),
                        ),
                        stages + more,
                    )
                    for slowest_s, stages in joined
                    for time_s, more in all_plans(chain, inner, rule, first, last, copies * count)
                ]
            yield from joined


def needed_nbytes(chain, stages):
    """Return the fullest worker's need: a version of weights and activations per mini-batch in
    flight."""
    most = 0
    for index, stage in enumerate(stages):
        span = slice(stage.first_layer, stage.last_layer + 1)
        kept = sum(chain.params_nbytes[span]) + sum(chain.activation_nbytes[span])
        onwards = sum(later.replicas for later in stages[index:])
        most = max(most, -(-onwards // stage.replicas) * kept)
    return most


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_no_better_plan_exists(rule, depth):
    rng, shapes = random.Random(f"{rule} {depth}"), set()
    for _ in range(150):
        chain, levels = random_chain(rng, rng.randint(1, 5)), random_levels(rng, depth)
        plans = list(all_plans(chain, levels, rule, 0, len(chain.names)))
        planned = plan_pipedream(chain, levels, rule)
        assert planned.bottleneck_s == pytest.approx(min(time_s for time_s, _ in plans))
        its_times = [time_s for time_s, stages in plans if stages == planned.stages]
        assert min(its_times) == pytest.approx(planned.bottleneck_s)
        shapes.add(tuple(stage.replicas for stage in planned.stages))
        alone_s = data_parallel_s(chain, levels, rule)
        assert any(len(s) == 1 and t == pytest.approx(alone_s) for t, s in plans)
    assert len(shapes) > 8, "the chains should ask for plans of many shapes"


@pytest.mark.parametrize("depth", [1, 2])
def test_no_better_plan_exists_within_a_capacity(depth):
    rng, outcomes = random.Random(depth), {"binding": 0, "refused": 0}
    for _ in range(200):
        chain, levels = random_chain(rng, rng.randint(1, 5)), random_levels(rng, depth)
        capacity_nbytes = rng.randint(9, 150)
        plans = list(all_plans(chain, levels, "text", 0, len(chain.names)))
        times_s = [t for t, stages in plans if needed_nbytes(chain, stages) <= capacity_nbytes]
        if not times_s:
            outcomes["refused"] += 1
            with pytest.raises(PlanError, match=rf"no plan fits {capacity_nbytes} bytes .* \d+:"):
                plan_pipedream(chain, levels, capacity_nbytes=capacity_nbytes)
            continue
        outcomes["binding"] += min(times_s) > min(time_s for time_s, _ in plans)
        planned = plan_pipedream(chain, levels, capacity_nbytes=capacity_nbytes)
        assert planned.bottleneck_s == pytest.approx(min(times_s))
        needed = max(stage_memory_nbytes(chain, planned))
        assert needed == needed_nbytes(chain, planned.stages) <= capacity_nbytes
    assert min(outcomes.values()) > 5, outcomes


def test_devices_of_a_server_share_the_sum_of_its_copy():
    """Compute 4 x 2 s and sum 4 x 3/4 x 6 bytes at 3 bytes/s between servers of 2 devices each.

    By the published code a copy of all layers on each server sums over 2 devices: 3 s, not 6.
    """
    chain = ChainCosts(("a",), (3.0,), (5.0,), (0,), (6,), (0,))
    levels = [Level(2, math.inf), Level(4, 3.0)]
    assert data_parallel_s(chain, levels, "published-code") == (8 / 2 + 3.0) / 4
    assert plan_pipedream(chain, levels, "published-code").bottleneck_s == (8 / 2 + 3.0) / 4
    assert data_parallel_s(chain, levels) == max(8 / 2, 2 * 3 / 4 * 6 / 3) / 4


def test_mini_batches_in_flight():
    """Stage n of N in a straight pipeline keeps N - n; the input stage of 2-1 keeps ceil(3 / 2)."""
    straight = PipeDreamPlan(tuple(PipeDreamStage(n, n, 1) for n in range(4)), 1.0)
    assert straight.in_flight() == (4, 3, 2, 1)
    assert PipeDreamPlan((PipeDreamStage(0, 0, 2), PipeDreamStage(1, 1, 1)), 1.0).in_flight() == (
        2,
        1,
    )


def test_invalid_arguments_are_refused():
    chain = random_chain(random.Random(0), 3)
    with pytest.raises(PlanError, match="0 components"):
        Level(0, 1.0)
    for bandwidth_Bps in (0.0, math.nan):
        with pytest.raises(PlanError, match="bandwidth"):
            Level(1, bandwidth_Bps)
    with pytest.raises(PlanError, match="0 levels"):
        plan_pipedream(chain, [])
    with pytest.raises(PlanError, match="no rule 'paper'"):
        plan_pipedream(chain, [Level(2, 1.0)], "paper")
    with pytest.raises(PlanError, match="0 layers"):
        plan_pipedream(ChainCosts((), (), (), (), (), ()), [Level(2, 1.0)])
    with pytest.raises(CostError, match="cut_nbytes has 0 entries, the chain 1 layers"):
        ChainCosts(("a",), (1.0,), (1.0,), (1,), (1,), ())
