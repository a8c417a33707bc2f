"""The planner: its choices, its refusals, and a comparison with all partitions of small cases."""

import math
import random
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from tables import MIB, make_table

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import DeviceCost, LayerCost, LinkCost, TiedBytes
from hetpipe.errors import CostError, PlanError, ScheduleError
from hetpipe.plan.baselines import even_plan, link_blind_plan, speed_blind_plan
from hetpipe.plan.planner import make_pipeline, make_plan
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import predict, predicted_step_s, stage_times, tied_stages
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.schedule import rule
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.sdk.info import HOST_MEMORY

SPEEDS = {"a": 1.0, "b": 3.0}


def test_layers_follow_speed():
    plan = make_plan(make_table(SPEEDS), ["a", "b"], mini_batch=32, microbatches=8)
    assert {s.devices[0]: s.hi - s.lo for s in plan.stages} == {"a": 2, "b": 6}
    assert plan.origin == "balanced"
    assert plan.samples_per_s == 32 / plan.step_s
    assert plan.fill_limit == 8 / 9
    assert plan.schedule == "1f1b"


def test_the_prediction_is_the_simulation_and_the_overhead():
    table = make_table(SPEEDS, overhead_s=0.25)
    plan = make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    timeline = predict(plan, table)
    assert plan.step_s == timeline.total_s == timeline.step_s + 0.25
    assert timeline.workers == plan.devices
    assert plan.step_s >= 8 * 6.0  # the slowest stage: M (F + B)


def test_cores_that_compute_also_copy_transfers():
    """Between processors each end pays half of a transfer, but not if the link is emulated."""
    table = make_table({"a": 1.0, "b": 1.0}, bandwidth=MIB / 0.5)
    host = make_table({"a": 1.0, "b": 1.0}, bandwidth=MIB / 0.5, domain=HOST_MEMORY)
    slow = {pair: replace(link, label="emulated") for pair, link in host.links.items()}
    plan = make_plan(table, ["a", "b"], mini_batch=32, microbatches=8, cuts=[4])
    assert stage_times(plan, table).forward_s == (4.0, 4.0)
    assert stage_times(plan, host).forward_s == (4.25, 4.25)
    assert stage_times(plan, host).backward_s == (8.25, 8.25)
    assert stage_times(plan, replace(host, links=slow)).forward_s == (4.0, 4.0)
    tied = replace(host, tied=(TiedBytes("w", MIB, (0, 7)),))  # 0.5 s in each direction
    before_s, after_s = (stage_times(plan, each).update_s for each in (host, tied))
    assert after_s == pytest.approx([each_s + 0.5 for each_s in before_s])


def test_a_plan_of_a_faulty_schedule_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(rule, "_rules", dict(rule._rules))

    @rule.register_schedule("short")
    def short(stages, microbatches, in_flight):
        *rows, last = rule.rule_of("1f1b").rows(stages, microbatches, in_flight, stages)
        return *rows, last[:-1]

    table = make_table(SPEEDS)
    plan = make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    with pytest.raises(ScheduleError, match="B7"):
        predicted_step_s(replace(plan, schedule="short"), table)


def random_table(rng):
    """Return 2 or 3 devices that are good at different layers, which is harder than any real
    cluster."""
    names = ["a", "b", "c"][: rng.randint(2, 3)]
    layers = rng.randint(len(names), 7)
    cost = lambda: LayerCost(rng.uniform(0.1, 2), rng.uniform(0.1, 2), 0.1)  # noqa: E731
    return replace(
        make_table(dict.fromkeys(names, 1.0), layers),
        devices={
            name: DeviceCost(tuple(cost() for _ in range(layers)), 0.0, 1 << 40, name)
            for name in names
        },
        links={
            (a, b): LinkCost(rng.uniform(0, 0.5), MIB * rng.uniform(1, 9))
            for a, b in permutations(names, 2)
        },
    )


def fastest_step_s(table):
    """Return the best step of all orders x cuts x depths; check that the bound for pruning
    holds."""
    priced = Priced({table.samples: table}, PlannerOptions(24, (6,)))
    stages, layers = len(table.devices), len(table.layers)
    best_s = math.inf
    for order in permutations(table.devices):
        for cuts in combinations(range(1, layers), stages - 1):
            for scale in (1, 2):
                depths = tuple(min(scale * (stages - n) - scale + 1, 6) for n in range(stages))
                groups = tuple((device,) for device in order)
                proposal = Proposal(cuts, groups, "1f1b", 6, depths)
                step_s = priced.plan(proposal, "user").step_s
                assert priced.bound_s(proposal) <= step_s * (1 + 1e-12)
                best_s = min(best_s, step_s)
    return best_s


def test_a_short_model_gets_the_fastest_partition():
    for seed in range(12):
        table = random_table(random.Random(seed))
        plan = make_plan(table, list(table.devices), mini_batch=24, microbatches=6)
        assert plan.step_s == pytest.approx(fastest_step_s(table), rel=1e-8)


def test_the_partitioners_proposals_are_near_the_fastest_partition(monkeypatch):
    monkeypatch.setattr("hetpipe.plan.search.FEW", 0)
    gaps = []
    for seed in range(20):
        table = random_table(random.Random(seed))
        plan = make_plan(table, list(table.devices), mini_batch=24, microbatches=6)
        gaps.append(plan.step_s / fastest_step_s(table) - 1)
    assert min(gaps) >= -1e-12
    assert sum(gaps) / len(gaps) < 0.02
    assert max(gaps) < 0.2


def test_given_cuts_and_a_given_order_are_kept():
    table = make_table(SPEEDS)
    plan = make_plan(table, ["a", "b"], mini_batch=32, microbatches=8, cuts=[5])
    assert (plan.cuts, plan.devices, plan.origin) == ((5,), ("a", "b"), "user")
    for order in (("a", "b"), ("b", "a")):
        plan = make_plan(table, order, mini_batch=32, microbatches=8, fixed_order=True)
        assert plan.devices == order


def test_the_order_avoids_a_slow_link():
    table = make_table({"a": 1.0, "b": 1.0, "c": 1.0}, 9)
    for pair in (("a", "b"), ("b", "a")):
        table.links[pair] = LinkCost(50.0, 1e12)
    plan = make_plan(table, ["a", "b", "c"], mini_batch=32, microbatches=8)
    assert plan.devices[1] == "c"


def test_slow_transfers_get_more_warm_up():
    slow = make_table({"a": 1.0, "b": 1.0}, latency_s=2.0)
    assert make_plan(slow, ["a", "b"], mini_batch=64, microbatches=16).in_flight == (3, 1)
    plan = make_plan(slow, ["a", "b"], mini_batch=64, microbatches=16, cuts=[4])
    assert plan.in_flight == (3, 1)
    assert plan.notes == ("by the costs, depths 3, 1 are better than 2, 1",)
    free = make_table({"a": 1.0, "b": 1.0}, bandwidth=math.inf)
    assert make_plan(free, ["a", "b"], mini_batch=64, microbatches=16).in_flight == (2, 1)


def test_in_flight_matches_the_schedule():
    for schedule in ("1f1b", "gpipe"):
        table = make_table({"a": 1.0, "b": 1.0, "c": 2.0})
        plan = make_plan(table, list("abc"), mini_batch=8, microbatches=2, schedule=schedule)
        made = generate(schedule, 3, 2, in_flight=plan.in_flight)
        assert max_in_flight(made) == list(plan.in_flight)


def test_a_lack_of_memory_reduces_the_depth():
    # Stage 0: 4 layers x (2 + 2 MiB weights, gradients, state + 10 MiB saved x K) + 2 MiB
    # buffers.
    table = make_table({"a": 1.0, "b": 1.0}, latency_s=2.0, saved=10 * MIB)
    ask = {"mini_batch": 64, "microbatches": 16, "cuts": [4]}
    wide = make_plan(table, ["a", "b"], **ask)
    assert [s.memory_nbytes // MIB for s in wide.stages] == [18 + 120, 18 + 40]
    for capacity, depths in [(138, (3, 1)), (137, (2, 1)), (97, (1, 1))]:
        small = make_table(
            {"a": 1.0, "b": 1.0}, latency_s=2.0, saved=10 * MIB, memory=capacity * MIB
        )
        assert make_plan(small, ["a", "b"], **ask).in_flight == depths


def test_a_lack_of_memory_moves_layers():
    table = make_table(SPEEDS)
    table.devices["b"] = replace(table.devices["b"], memory_nbytes=20 * MIB)
    plan = make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    assert {s.devices[0]: s.hi - s.lo for s in plan.stages} != {"a": 2, "b": 6}
    assert all(s.memory_nbytes <= s.capacity_nbytes for s in plan.stages)


def test_an_error_names_the_stage_and_the_missing_bytes():
    table = make_table(SPEEDS, memory=10 * MIB)
    with pytest.raises(PlanError, match=r"stage \d \(layers \d\.\.\d on .\) needs (\d+) bytes .* "
                                        r"and has 10485760 .*: \d+ bytes are missing"):  # fmt: skip
        make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)


def test_devices_that_share_memory_share_its_capacity():
    ask = {"mini_batch": 32, "microbatches": 8}
    own = make_table(SPEEDS, memory=40 * MIB)
    assert make_plan(own, ["a", "b"], **ask)
    shared = make_table(SPEEDS, memory=40 * MIB, domain="ram")
    with pytest.raises(
        PlanError, match="together with the earlier stages in the memory ram, needs"
    ):
        make_plan(shared, ["a", "b"], **ask)
    assert make_plan(make_table(SPEEDS, memory=80 * MIB, domain="ram"), ["a", "b"], **ask)


def without(table, device, indices):
    """Return the table with some layers that the device cannot run."""
    cost = table.devices[device]
    refused = LayerCost(math.inf, math.inf, 0.0, "no kernel for it")
    layers = tuple(refused if i in indices else entry for i, entry in enumerate(cost.layers))
    return replace(table, devices={**table.devices, device: replace(cost, layers=layers)})


def test_a_layer_stays_off_a_device_that_cannot_run_it():
    table = without(make_table(SPEEDS), "b", {0, 1, 2, 3})
    plan = make_plan(table, ["b", "a"], mini_batch=32, microbatches=8)
    assert [(s.devices, s.lo, s.hi) for s in plan.stages] == [(("a",), 0, 4), (("b",), 4, 8)]
    assert plan.notes == ("b cannot run layer l0: no kernel for it (a can) and 3 more",)


def test_a_layer_that_no_device_can_run_is_named_with_the_reasons():
    table = without(without(make_table(SPEEDS), "a", {3}), "b", {3})
    with pytest.raises(PlanError, match=r"none of them can run layer l3 \(a: no kernel for it; b"):
        make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    table = without(without(make_table(SPEEDS), "a", {0, 7}), "b", {3})
    with pytest.raises(PlanError, match="no cuts give every layer to a device"):
        make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    table = without(make_table(SPEEDS), "b", {3})
    with pytest.raises(PlanError, match=r"cannot run layer l3: no kernel for it \(a can\)"):
        make_plan(table, ["a", "b"], mini_batch=32, microbatches=8, cuts=[3])


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        (
            ["a", "b"],
            {"microbatches": 4},
            "have up to 8 samples each, but the costs are for 4; profile at 8",
        ),
        (["a", "b"], {"microbatches": 64}, "of 32 cannot be 64 micro-batches; choose 1 to 32"),
        (["a", "x"], {}, "no costs for x; the table of toy has a, b"),
        (["a", "a"], {}, "each once"),
        ([], {}, "name one or more"),
        (["a", "b"], {"cuts": [0]}, r"cuts \[0\]: the devices a, b need 1 cuts, .* 1 to 7"),
        (["a", "b"], {"cuts": [3, 5]}, "a, b need 1 cuts"),
    ],
)
def test_invalid_arguments_are_refused(devices, options, message):
    ask = {"mini_batch": 32, "microbatches": 8, **options}
    with pytest.raises(PlanError, match=message):
        make_plan(make_table(SPEEDS), devices, **ask)


@pytest.mark.parametrize("planner", [make_plan, even_plan, speed_blind_plan])
def test_more_stages_than_layers_are_refused(planner):
    table = make_table({"a": 1.0, "b": 1.0, "c": 1.0}, layers=2)
    with pytest.raises(PlanError, match="3 stages need a layer each; toy has 2"):
        planner(table, ["a", "b", "c"], mini_batch=32, microbatches=8)


def test_a_link_without_a_cost_is_named():
    table = replace(make_table(SPEEDS), links={})
    with pytest.raises(CostError, match="no cost for the link a -> b"):
        make_plan(table, ["a", "b"], mini_batch=32, microbatches=8)


def test_baselines_are_priced_by_the_true_costs():
    table = make_table(SPEEDS, layers=9)
    ask = {"mini_batch": 32, "microbatches": 8}
    even = even_plan(table, ["a", "b"], **ask)
    assert (even.cuts, even.origin) == ((4,), "even")
    assert even.stages[0].forward_s == 4.0
    blind = speed_blind_plan(make_table(SPEEDS), ["a", "b"], **ask)
    assert (blind.cuts, blind.origin) == ((4,), "speed-blind")
    best = make_plan(table, ["a", "b"], **ask)
    assert best.step_s < 0.6 * even.step_s


def test_the_link_blind_plan_pays_for_the_link():
    """A planner that knows the link's cost prefers a cut with few bytes to balanced stages."""
    table = make_table({"a": 1.0, "b": 1.0}, bandwidth=MIB / 2.0)
    layers = [replace(layer, cut_nbytes=8 * MIB) for layer in table.layers]
    layers[2] = replace(layers[2], cut_nbytes=0)
    table = replace(table, layers=tuple(layers))
    aware = make_pipeline({4: table}, ["a", "b"], PlannerOptions(32))
    blind = link_blind_plan({4: table}, ["a", "b"], mini_batch=32)
    assert (aware.cuts, aware.origin) == ((3,), "balanced")
    assert (blind.cuts, blind.origin) == ((4,), "link-blind")
    assert blind.step_s == predict(blind, table).total_s > 1.5 * aware.step_s


def test_the_speed_blind_split_still_weighs_unequal_layers():
    table = make_table(SPEEDS)
    for name, cost in table.devices.items():
        heavy = replace(cost.layers[0], forward_s=7 * cost.layers[0].forward_s,
                        backward_s=7 * cost.layers[0].backward_s)  # fmt: skip
        table.devices[name] = replace(cost, layers=(heavy, *cost.layers[1:]))
    blind = speed_blind_plan(table, ["a", "b"], mini_batch=32, microbatches=8)
    assert blind.cuts == (1,)
    assert even_plan(table, ["a", "b"], mini_batch=32, microbatches=8).cuts == (4,)


def tables(speeds, sizes=(2, 4, 8, 16, 32), **options):
    return {size: make_table(speeds, samples=size, **options) for size in sizes}


def test_a_pipeline_chooses_the_microbatches():
    plan = make_pipeline(tables(SPEEDS), ["a", "b"], PlannerOptions(32))
    assert plan.microbatches == 16  # without overheads, more micro-batches fill better
    counts = (1, 2, 4, 8, 16)
    each = [make_pipeline(tables(SPEEDS), ["a", "b"], PlannerOptions(32, (m,))) for m in counts]
    assert plan.step_s == min(one.step_s for one in each)


def plan_without_replicas(tables, devices, mini_batch):
    options = PlannerOptions(mini_batch, replicas=False)
    return plan_on(tables, Cluster.with_ids(devices), options)


def test_a_device_is_unused_if_that_is_faster():
    slow_link = tables({"a": 1.0, "b": 20.0}, latency_s=30.0)
    assert plan_without_replicas(slow_link, ["a", "b"], 32).devices == ("b",)
    forced = make_pipeline(slow_link, ["a", "b"], PlannerOptions(32))
    assert len(forced.stages) == 2


def test_memory_decides_between_equally_fast_plans():
    plan = make_pipeline(tables({"a": 1.0}), ["a"], PlannerOptions(32))
    assert (plan.schedule, plan.microbatches, plan.in_flight) == ("1f1b", 16, (1,))


def test_only_sizes_that_differ_by_one_are_used():
    plan = make_pipeline(tables(SPEEDS, sizes=(4, 5)), ["a", "b"], PlannerOptions(14))
    assert plan.microbatches == 4
    with pytest.raises(PlanError, match="no power of two divides a mini-batch of 9"):
        make_pipeline(tables(SPEEDS, sizes=(4,)), ["a", "b"], PlannerOptions(9))


def test_the_bytes_that_every_plan_lacks_are_named():
    with pytest.raises(PlanError, match="bytes are missing"):
        plan_without_replicas(tables(SPEEDS, memory=MIB), ["a", "b"], 32)


def test_more_than_four_devices_keep_their_order():
    speeds = dict.fromkeys("abcde", 1.0)
    plan = make_pipeline(tables(speeds, sizes=(4,)), list("edcba"), PlannerOptions(32))
    assert plan.devices == tuple("edcba")


def test_tied_parameters_have_a_price_only_across_cuts():
    free = make_table(SPEEDS, bandwidth=MIB)
    tied = replace(free, tied=(TiedBytes("embedding", 10 * MIB, (0, 7)),))
    ask = {"mini_batch": 32, "microbatches": 8, "cuts": [2]}
    plan = make_plan(tied, ["a", "b"], **ask)
    assert tied_stages(plan, tied) == ((0, (1,)),)
    assert tied_stages(plan, free) == ()
    # The gradient of 10 s waits for both stages' backwards, the parameter for the update.
    assert plan.step_s > make_plan(free, ["a", "b"], **ask).step_s + 10
    near = replace(free, tied=(TiedBytes("embedding", 10 * MIB, (0, 1)),))
    assert make_plan(near, ["a", "b"], **ask).step_s == make_plan(free, ["a", "b"], **ask).step_s
    assert "0RG1" in {str(span.action) for span in predict(plan, tied).spans}


def test_a_stream_pays_for_its_tied_parameters():
    """Every mini-batch moves the parameter and its gradient, of 10 s each, at the same time."""
    free = make_table({"a": 1.0, "b": 1.0}, bandwidth=MIB)
    tied = replace(free, tied=(TiedBytes("embedding", 30 * MIB, (0, 7)),))
    ask = {"mini_batch": 4, "microbatches": 1, "cuts": [4], "schedule": "pipedream"}
    plan = make_plan(tied, ["a", "b"], weights="stash", **ask)
    alone = make_plan(free, ["a", "b"], weights="stash", **ask)
    assert plan.step_s > 30 > alone.step_s + 10
    sent = {str(span.action) for span in predict(plan, tied).spans}
    assert {"0SP1", "1RP0@1", "1SG0@1", "0RG1@1"} <= sent


def test_every_end_has_memory_for_the_mini_batches_in_flight():
    """The weights with their gradients and states, the other versions, the saved tensors, and the
    buffers of the cuts; two stages and the first one share the weight of a layer."""
    free = make_table(dict.fromkeys("abc", 1.0), layers=6)
    tied = replace(free, tied=(TiedBytes("w", MIB, (0, 2, 4)),))
    ask = {"mini_batch": 4, "microbatches": 1, "cuts": [2, 4], "schedule": "pipedream"}
    for weights, depths, versions in (
        ("stash", (3, 2, 1), (3, 2, 1)),
        ("vertical-sync", (3, 2, 1), (3, 3, 3)),
        ("pipeoptim", (3, 2, 1), (2, 2, 2)),
    ):
        plan = make_plan(tied, list("abc"), weights=weights, **ask)
        assert plan.in_flight == depths
        for n, stage in enumerate(plan.stages):
            borrowed = versions[n] if n == 0 else depths[n]  # of one layer's weight
            kept = 2 * (1 + 2) + versions[n] + borrowed + 2 * depths[n]
            cuts = 2 * (n > 0) + 2 * (n < 2)
            assert stage.memory_nbytes == (kept + cuts) * MIB, (weights, n)


@pytest.mark.parametrize(
    ("labels", "label"),
    [
        (("measured", "measured", "measured"), "measured"),
        (("measured", "emulated", "measured"), "emulated"),
        (("measured", "emulated", "modelled"), "modelled"),
        (("modelled", "measured", "measured"), "modelled"),
    ],
)
def test_a_plan_is_as_certain_as_its_least_certain_cost(labels, label):
    table = make_table(SPEEDS)
    for name, one in zip(SPEEDS, labels, strict=False):
        table.devices[name] = replace(table.devices[name], label=one)
    for pair, link in table.links.items():
        table.links[pair] = replace(link, label=labels[2])
    assert make_plan(table, ["a", "b"], mini_batch=32, microbatches=8).label == label


def test_devices_that_stream_hide_their_transfers():
    """The step is (M + N - 1)(F + B) and the update, as in BaPipe's table 1; other devices take
    longer."""
    sync = make_table({"a": 1.0, "b": 1.0}, bandwidth=MIB / 0.5)
    streaming = {name: replace(cost, execution="async") for name, cost in sync.devices.items()}
    table = replace(sync, devices=streaming)
    options = {"mini_batch": 32, "microbatches": 8, "cuts": [4], "schedule": "1f1b-as"}
    plan = make_plan(table, ["a", "b"], **options)
    assert stage_times(plan, table).chunks == (math.inf, math.inf)
    assert plan.step_s == pytest.approx((8 + 1) * 12.0 + 0.4)
    assert make_plan(sync, ["a", "b"], **options).step_s > plan.step_s + 1
