"""Plans of models that only predict: the passes, messages and sums of a training cost nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tables import make_table, plan_by

from hetpipe.cost.table import CostTable
from hetpipe.explain.explanation import explain
from hetpipe.plan.plan import Plan
from hetpipe.plan.priced import Priced
from hetpipe.plan.pricing import predict, predicted_step_s
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.plan.simulation import simulate
from hetpipe.schedule.action import FORWARDS


def predicting(table: CostTable, overhead_s: float = 0.25) -> CostTable:
    """Return the table of a model that only predicts."""
    devices = {
        id: replace(
            cost,
            overhead_s=overhead_s,
            layers=tuple(replace(layer, backward_s=0.0, update_s=0.0) for layer in cost.layers),
        )
        for id, cost in table.devices.items()
    }
    layers = tuple(replace(layer, state_nbytes=0, saved_nbytes=0) for layer in table.layers)
    return replace(table, devices=devices, layers=layers, trains=False)


TABLE = predicting(make_table({"fast": 2.0, "slow": 1.0}, latency_s=0.5, bandwidth=float(1 << 20)))


def two(cut: int, schedule: str = "1f1b") -> Plan:
    return plan_by({4: TABLE}, Proposal((cut,), (("fast",), ("slow",)), schedule, 4), 16)


def by_hand_s(cut: int) -> float:
    """Return the seconds of four micro-batches that pass two stages and one link."""
    first_s = 0.25 + cut * (0.5 - 0.25)
    second_s = 0.25 + (8 - cut) * (1 - 0.25)
    free_s = sent_s = ready_s = 0.0
    for _ in range(4):
        free_s += first_s
        sent_s = max(sent_s, free_s) + 1.0
        ready_s = max(ready_s, sent_s + 0.5) + second_s
    return ready_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "fbp"])
def test_a_step_has_only_forwards(schedule: str) -> None:
    for cut in range(1, 8):
        plan = two(cut, schedule)
        timeline = predict(plan, TABLE)
        assert {span.action.op for span in timeline.spans} == FORWARDS
        assert plan.step_s == predicted_step_s(plan, TABLE) == timeline.total_s
        assert timeline.total_s == pytest.approx(by_hand_s(cut))
        assert [stage.backward_s for stage in plan.stages] == [0.0, 0.0]


def test_no_bound_is_above_the_step() -> None:
    priced = Priced({4: TABLE}, PlannerOptions(16))
    proposals = [
        Proposal((cut,), groups, "1f1b", 4)
        for cut in range(1, 8)
        for groups in ((("fast",), ("slow",)), (("slow",), ("fast",)))
    ]
    for each in proposals:
        assert priced.bound_s(each) <= priced.plan(each, "user").step_s + 1e-9
    best = priced.quickest(proposals, "user")
    assert best.step_s == min(priced.plan(each, "user").step_s for each in proposals)


def test_replicas_sum_no_gradients() -> None:
    plan = plan_by({4: TABLE}, Proposal((), (("fast", "slow"),), "1f1b", 4), 16)
    assert plan.stages[0].all_reduce_s == 0.0
    assert predict(plan, TABLE).total_s == plan.step_s


def test_memory_does_not_grow_with_micro_batches() -> None:
    use = simulate(two(4), TABLE).outcome.peak_nbytes
    assert use == tuple(stage.memory_nbytes for stage in two(4).stages)


def test_an_explanation_has_no_gradients() -> None:
    explanation = explain(two(2), TABLE)
    (message,) = explanation.transfers
    assert (message.source, message.target) == ("fast", "slow")
    assert explanation.advice
    assert not any("schedule" in advice.change for advice in explanation.advice)
    assert "Transfers in a step, predicted" in str(explanation)
