"""Costs learned from timelines, and plans that follow them, without a device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.pipeline.learning import WINDOW, Hysteresis, Learning, ratios_of, scale_costs, typical
from hetpipe.pipeline.rebalance import Rebalancer
from hetpipe.plan.plan import Plan
from hetpipe.plan.planner import make_plan, predict
from hetpipe.schedule.action import Op
from hetpipe.simulate.timeline import Timeline

LAYERS = 10
MIB = 2**20


def table(memory_nbytes: int = 2**40) -> CostTable:
    """Return ten equal layers on two equal devices."""
    layer = LayerCost(0.001, 0.002, 0.0005)
    devices = {
        name: DeviceCost((layer,) * LAYERS, 0.0002, memory_nbytes, name) for name in ("a", "b")
    }
    links = {("a", "b"): LinkCost(1e-6, 1e10), ("b", "a"): LinkCost(1e-6, 1e10)}
    layers = tuple(LayerBytes(f"l{n}", MIB, 0, 0, 1000) for n in range(LAYERS))
    return CostTable("model", 2, layers, devices, links, 0.0001)


def plan_of(costs: CostTable, schedule: str = "1f1b", weights: str = "flush") -> Plan:
    return make_plan(
        costs, ["a", "b"], mini_batch=8, microbatches=4, schedule=schedule, weights=weights
    )


def measure(plan: Plan, costs: CostTable, factors: Mapping[str, float]) -> Timeline:
    """Return the step's timeline if each device takes `factors` times its costs."""
    return predict(plan, scale_costs(costs, factors))


def disturb(timeline: Timeline, op: Op, seconds: float) -> Timeline:
    """Return the timeline with stage 0's first pass of this kind set to `seconds`."""
    spans = list(timeline.spans)
    at = next(n for n, s in enumerate(spans) if s.action.op is op and s.action.stage == 0)
    spans[at] = spans[at]._replace(end_s=spans[at].start_s + seconds)
    return replace(timeline, spans=tuple(spans))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "pipedream", "fbp"])
def test_a_slow_device_is_seen(schedule: str, recompute: bool) -> None:
    costs = table()
    plan = plan_of(costs, schedule, "stash" if schedule == "pipedream" else "flush")
    plan = replace(plan, recompute=recompute)
    ratios = ratios_of([measure(plan, costs, {"a": 2.0, "b": 0.7})], plan, costs)
    assert ratios["a"] == pytest.approx([2.0], rel=0.02)
    assert ratios["b"] == pytest.approx([0.7], rel=0.02)


def test_replicas_have_no_ratio() -> None:
    """Each replica computes a part of a micro-batch, and the costs are for whole ones."""
    costs = table()
    plan = plan_of(costs)
    timeline, (first, second) = measure(plan, costs, {"b": 0.7}), plan.stages
    plan = replace(plan, stages=(replace(first, devices=("a", "b"), shares=(1.0, 1.0)), second))
    ratios = ratios_of([timeline], plan, costs)
    assert ratios.keys() == {"b"}
    assert ratios["b"] == pytest.approx([0.7], rel=0.02)


def test_the_last_passes_correct_a_prediction() -> None:
    """Passes of slowed devices correct the predicted time, and their variation gives the
    interval."""
    costs = table()
    plan = plan_of(costs)
    learning = Learning(replace(costs, contention=0.6), plan)
    widths = []
    for noise in (0.0, 0.3):
        learning.restart(plan)
        assert learning.corrected() is None
        for part in (-1, 0, 1):
            factors = {"a": 3.0 * (1 + noise * part), "b": 1.5}
            learning.add(measure(plan, costs, factors))
        found = learning.corrected()
        assert found is not None
        typical_s = measure(plan, costs, {"a": 3.0, "b": 1.5}).step_s
        assert found.raw_s == plan.step_s
        assert found.corrected_s == pytest.approx(typical_s, rel=0.03)
        assert found.drifts == pytest.approx({"a": 3.0, "b": 1.5}, rel=0.03)
        assert "corrected by the last passes of the training" in str(found)
        widths.append(found.interval_s)
    assert widths[0] is None  # these costs and passes have no spread
    assert widths[1] is not None
    assert widths[1][1] / typical_s > 1.15


@pytest.mark.parametrize("op", [Op.FORWARD, Op.BACKWARD, Op.UPDATE])
@pytest.mark.parametrize("seconds", [math.nan, 0.0, -0.1, math.inf, 1e9])
def test_a_senseless_time_is_ignored(op: Op, seconds: float) -> None:
    """Skip it in that mini-batch and for that device only."""
    costs = table()
    plan = plan_of(costs)
    timeline = disturb(measure(plan, costs, {"a": 2.0, "b": 2.0}), op, seconds)
    ratios = ratios_of([timeline], plan, costs)
    assert ratios.keys() == {"b"}
    assert ratios["b"] == pytest.approx([2.0], rel=0.02)


def test_one_long_time_moves_nothing() -> None:
    costs = table()
    plan = plan_of(costs)
    learning = Learning(costs, plan)
    for number in range(WINDOW):
        timeline = measure(plan, costs, {"a": 1.5})
        learning.add(disturb(timeline, Op.FORWARD, 5.0) if number == 3 else timeline)
    assert learning.factors == pytest.approx({"a": 1.5, "b": 1.0}, rel=0.02)
    assert learning.table().forward_s("a", 0, 5) == pytest.approx(
        1.5 * costs.forward_s("a", 0, 5), rel=0.02
    )
    assert learning.table().layers == costs.layers


def test_factors_stay_when_stages_change() -> None:
    """Factors stay until the new stages have enough measured passes."""
    costs = table()
    plan = plan_of(costs)
    learning = Learning(costs, plan)
    assert learning.table() == costs
    assert learning.step_s is None
    for _ in range(WINDOW):
        learning.add(measure(plan, costs, {"a": 2.0}))
    assert learning.step_s == pytest.approx(measure(plan, costs, {"a": 2.0}).step_s)
    moved = plan_of(learning.table())
    assert moved != plan
    learning.restart(moved)
    learning.add(measure(moved, costs, {"a": 1.0}))
    assert learning.factors["a"] == pytest.approx(2.0, rel=0.02)


def test_devices_that_compute_beside_fewer_others_are_as_predicted() -> None:
    """The profile is of three devices, and each takes half of its time alone."""
    costs = table()
    devices = {id: replace(costs.devices["a"], alone=0.5) for id in "abc"}
    links = {(one, other): costs.links["a", "b"] for one in "abc" for other in "abc"}
    training, rebalancer = make_training(replace(costs, devices=devices, links=links))
    training.train(rebalancer, iter([{}] * 2 * WINDOW))
    assert rebalancer._learning is not None
    assert rebalancer._learning.factors == pytest.approx({"a": 1.0, "b": 1.0}, rel=0.02)
    made = rebalancer.rebalance(1000)
    assert not made.moved
    assert made.before_s == pytest.approx(made.after_s) == pytest.approx(training.plan.step_s)


def test_the_typical_value_is_the_mean_of_the_middle_half() -> None:
    assert typical([1.0, 2.0, 3.0, 1000.0]) == 2.5
    assert typical([1.0, 2.0]) == 1.5


def test_a_gain_is_followed_if_predicted_twice() -> None:
    hysteresis = Hysteresis()
    assert [hysteresis.moves(promise) for promise in (True, False, True, True)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert not hysteresis.waits()


def test_a_pause_doubles_after_a_missed_gain() -> None:
    hysteresis = Hysteresis()
    pauses = []
    for kept in (True, False, False, True):
        hysteresis.pause_after(kept)
        pauses.append(next(n for n in range(9) if not hysteresis.waits()))
    assert pauses == [1, 2, 4, 1]


class FakeTraining:
    """A training on devices of given speeds that moves layers at once."""

    def __init__(self, costs: CostTable, plan: Plan) -> None:
        self.costs, self.plan = costs, plan
        self.stages = SimpleNamespace(took_s=0.01)
        cluster = SimpleNamespace(members=(), described=())
        self.setup = SimpleNamespace(crew=SimpleNamespace(cluster=cluster))
        self.accumulated = self.steps = 0
        self.moves: list[int] = []
        self.watch: Any = None

    def move(self, plan: Plan) -> None:
        self.moves.append(self.steps)
        self.plan = plan

    def train(self, rebalancer: Rebalancer, factors: Iterator[Mapping[str, float]]) -> None:
        for each in factors:
            if rebalancer.due:
                rebalancer.follow()
            timeline = measure(self.plan, self.costs, each)
            self.steps += 1
            self.watch(SimpleNamespace(timeline=timeline), 8)


def make_training(costs: CostTable, auto: bool = True) -> tuple[FakeTraining, Rebalancer]:
    training = FakeTraining(costs, plan_of(costs))
    either: Any = training
    return training, Rebalancer(either, costs, "", auto)


def test_a_steady_machine_moves_nothing() -> None:
    """Train 500 steps with some percent of noise and an occasional slow step."""
    training, rebalancer = make_training(table())
    noise = (
        {"a": 1.02 + 0.04 * math.sin(n) + (n % 31 == 0), "b": 1.0 + 0.04 * math.cos(3 * n)}
        for n in range(500)
    )
    training.train(rebalancer, noise)
    assert training.moves == []


def test_a_device_that_slows_and_recovers_is_followed_within_30_steps() -> None:
    training, rebalancer = make_training(table())
    before = training.plan
    for slow in (1.0, 2.5, 1.0):
        training.train(rebalancer, iter([{"a": slow}] * 29))
        best = plan_of(scale_costs(table(), {"a": slow}))
        assert training.plan.step_s <= 1.05 * best.step_s, slow
    assert len(training.moves) == 2
    assert training.plan.step_s == pytest.approx(before.step_s)


def test_an_earlier_plan_is_preferred_to_a_slightly_faster_one() -> None:
    """`a` seems slightly faster after it recovers than it was before."""
    training, rebalancer = make_training(table())
    before = training.plan
    factor = next(
        factor for factor in (1.0 - n / 1000 for n in range(400))
        if plan_of(scale_costs(table(), {"a": factor})).cuts != before.cuts
    )  # fmt: skip
    for slow in (2.5, factor):
        training.train(rebalancer, iter([{"a": slow}] * 40))
    assert len(training.moves) == 2
    assert training.plan.cuts == before.cuts


def test_a_plan_beyond_the_memory_is_never_chosen() -> None:
    """Speed asks for all layers on b, which has memory for 6 layers' parameters and gradients."""
    training, rebalancer = make_training(table(memory_nbytes=12 * MIB + 10_000))
    training.train(rebalancer, iter([{"a": 50.0}] * 40))
    assert training.moves
    assert training.plan.cuts == (4,)
    assert max(stage.memory_nbytes for stage in training.plan.stages) <= 12 * MIB + 10_000


def test_a_move_happens_only_if_it_pays() -> None:
    training, rebalancer = make_training(table(), auto=False)
    training.stages.took_s = 5.0
    training.train(rebalancer, iter([{"a": 2.0}] * WINDOW))
    few, many = rebalancer.rebalance(100), rebalancer.rebalance(10_000)
    assert (few.moved, few.move_s, many.moved) == (False, 5.0, True)
    assert "to save more than the 5.0 s of a move in 100 steps" in few.why
    assert few.before_s == many.before_s > many.after_s
