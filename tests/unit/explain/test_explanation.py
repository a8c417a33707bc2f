"""Explanations of plans: shares against sampled moments, advice against plans that are built."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tables import make_table, plan_by

from hetpipe.cost.table import CostTable
from hetpipe.explain.advice import LEAST_GAIN
from hetpipe.explain.explanation import Measured, explain
from hetpipe.explain.use import minus, union
from hetpipe.plan.plan import Plan
from hetpipe.plan.proposal import Proposal
from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.timeline import Span, Timeline

UNEVEN = {"fast": 3.0, "slow": 1.0}


def two(
    table: CostTable, cut: int, schedule: str = "1f1b", microbatches: int = 4, mini_batch: int = 16
) -> Plan:
    groups = tuple((id,) for id in table.devices)
    return plan_by(
        {table.samples: table}, Proposal((cut,), groups, schedule, microbatches), mini_batch,
        "flush" if schedule != "pipedream" else "stash",
    )  # fmt: skip


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "fbp"])
def test_shares_agree_with_moments(schedule: str) -> None:
    """Ask at many moments which device computes, and compare."""
    table = make_table(UNEVEN, latency_s=0.3)
    plan = two(table, 4, schedule)
    explanation = explain(plan, table)
    assert explanation.simulation is not None
    timeline = explanation.simulation.timeline
    moments = np.linspace(0, timeline.step_s, 200_001)[:-1] + timeline.step_s / 400_000
    for use in explanation.devices:
        busy = np.zeros(len(moments), bool)
        for span in timeline.spans:
            own = timeline.workers[span.worker].partition(" lane ")[0] == use.device
            if own and span.action.op.is_compute:
                busy |= (span.start_s <= moments) & (moments < span.end_s)
        assert use.computing == pytest.approx(busy.mean(), abs=1e-4)
        whole = use.computing + use.receiving + use.summing + use.waiting + use.rest
        assert whole == pytest.approx(1.0)


def test_a_stream_counts_only_the_full_pipeline() -> None:
    """The device that decides the period of a stream computes all the time."""
    table = make_table(UNEVEN, samples=16)
    plan = two(table, 4, "pipedream", 1)
    uses = {use.device: use for use in explain(plan, table).devices}
    assert uses["slow"].computing == pytest.approx(1.0)
    assert uses["fast"].computing == pytest.approx(1 / 3, abs=0.04)  # the ends are ragged
    assert [*uses["fast"].waits] == ["gradients from slow"]


def test_a_wait_names_the_device_that_is_waited_for() -> None:
    table = make_table(UNEVEN)
    uses = {use.device: use for use in explain(two(table, 4), table).devices}
    assert max(uses["fast"].waits.items(), key=lambda item: item[1])[0] == "gradients from slow"
    assert set(uses["slow"].waits) == {"inputs from fast"}


def test_advice_is_the_best_of_the_plans_that_are_built() -> None:
    table = make_table(UNEVEN)
    plan = two(table, 3)
    steps_s = {cut: two(table, cut).step_s for cut in range(1, 8)}
    best = min(steps_s, key=lambda cut: steps_s[cut])
    (move,) = [each for each in explain(plan, table).advice if each.change.startswith("moving")]
    assert move.plan is not None
    assert move.plan.cuts == (best,)
    assert move.gain == pytest.approx(1 - steps_s[best] / plan.step_s)
    names = ", ".join(f"l{index}" for index in range(3, best))
    assert str(move) == (
        f"moving layers 3 to {best - 1} ({names}) to fast would save {100 * move.gain:.0f} % of "
        "the step, predicted"
    )


def test_other_micro_batches_are_priced_by_their_own_costs() -> None:
    tables = {size: make_table({"a": 1.0, "b": 1.0}, samples=size) for size in (2, 4, 8)}
    plan = two(tables[8], 4, microbatches=2)
    wanted = two(tables[2], 4, microbatches=8)
    (advice,) = [a for a in explain(plan, tables).advice if "micro-batches" in a.change]
    assert advice.change == "8 micro-batches instead of 2"
    assert advice.gain == pytest.approx(1 - wanted.step_s / plan.step_s)


def test_a_slow_link_is_named() -> None:
    table = make_table({"a": 1.0, "b": 1.0}, bandwidth=(1 << 20) / 2)  # 2 s for each cut
    advice = explain(two(table, 4), table).advice
    assert any(a.change == "a link of 2 times the bandwidth between a and b" for a in advice)
    free = make_table({"a": 1.0, "b": 1.0})
    assert not any("link" in a.change for a in explain(two(free, 4), free).advice)


def test_a_device_that_only_delays_is_left_out() -> None:
    table = make_table({"fast": 100.0, "slow": 1.0}, layers=2)
    changes = [each.change for each in explain(two(table, 1), table).advice]
    assert changes[0] == "leaving out slow, with its layers on fast,"


def test_memory_forbids_advice() -> None:
    """The move that saves most needs more memory than the device has, so it is not given."""
    table = make_table(UNEVEN, saved=100 << 20)
    wanted = explain(two(table, 3), table).advice
    assert any(each.change.startswith("moving") for each in wanted)
    plan = two(table, 3)
    small = {
        id: replace(cost, memory_nbytes=plan.stages[n].memory_nbytes)
        for n, (id, cost) in enumerate(table.devices.items())
    }
    tight = explain(plan, replace(table, devices=small)).advice
    assert not any(each.change.startswith(("moving", "leaving")) for each in tight)


def test_nothing_to_advise_is_said() -> None:
    table = make_table({"only": 1.0})
    plan = plan_by({4: table}, Proposal((), (("only",),), "1f1b", 4), 16)
    explanation = explain(plan, table)
    assert explanation.advice == ()
    assert f"no plan near this one saves {100 * LEAST_GAIN:.0f} %" in str(explanation)
    assert explanation.bottleneck.startswith("only computes for 100 % of the step")


def test_a_plan_without_costs_is_not_predicted() -> None:
    table = make_table(UNEVEN)
    plan = two(table, 4)
    text = str(explain(plan, {}))
    assert "a step was neither measured nor predicted" in text
    assert "no advice: the costs of this plan are unknown" in text


def test_measured_times_replace_the_predicted_ones() -> None:
    table = make_table(UNEVEN)
    plan = two(table, 4)
    spans = (
        Span(0, Action(0, Op.FORWARD, 0), 0.0, 2.0),
        Span(1, Action(1, Op.FORWARD, 0), 2.0, 3.0),
        Span(1, Action(1, Op.BACKWARD, 0), 3.0, 4.0),
        Span(0, Action(0, Op.BACKWARD, 0), 6.0, 8.0),
    )
    timeline = Timeline(("fast", "slow"), spans, "measured", overhead_s=2.0)
    explanation = explain(plan, table, measured=Measured(timeline, 10.0, (5, 7)))
    fast, slow = explanation.devices
    assert (fast.computing, slow.computing) == (0.4, 0.2)
    assert fast.waits == {"gradients from slow": 0.4}
    assert slow.waits == {"inputs from fast": 0.2}
    assert slow.rest == pytest.approx(0.6)
    assert explanation.memory["slow"].measured_nbytes == 7
    assert "a step takes 10 s, measured" in str(explanation)


def test_slowdowns_come_from_the_costs() -> None:
    table = make_table(UNEVEN)
    devices = {**table.devices, "slow": replace(table.devices["slow"], alone=0.8)}
    explanation = explain(two(table, 4), replace(table, devices=devices, contention=0.3))
    assert explanation.slowdowns == {"slow": 1.25}
    assert "slow takes 1.25 times as long while other devices compute" in str(explanation)
    assert "other work used 30 % of the cores" in str(explanation).replace("\n  ", " ")


def test_text_fits_80_columns() -> None:
    table = make_table({"a-device-with-a-long-name:opencl:0": 3.0, "another-device:cpu:1": 1.0})
    lines = str(explain(two(table, 3), table)).splitlines()
    assert max(map(len, lines)) <= 80


def test_replicas_are_explained() -> None:
    tables = {size: make_table({"a": 1.0, "b": 1.0, "c": 1.0}, samples=size) for size in (2, 4)}
    plan = plan_by(tables, Proposal((5,), (("a", "b"), ("c",)), "1f1b", 4), 16)
    explanation = explain(plan, tables)
    assert {each.source for each in explanation.transfers} == {"a + b", "c"}
    assert "inputs from a + b" in str(explanation)


def test_parts_are_joined_and_removed() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 1.5)]) == [(0, 2), (3, 4)]
    assert minus([(0, 5), (6, 8)], [(1, 2), (4, 7)]) == [(0, 1), (2, 4), (7, 8)]
    assert minus([(0, 1)], []) == [(0, 1)]
