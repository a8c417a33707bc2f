"""Costs follow their devices: probes, drift, corrected predictions, and devices that compute
alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP
from tables import make_table, plan_by

import hetpipe as hp
from hetpipe.bench.rows import PipelineRow
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.probe import Drift, Probe, drift
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.plan.building import replicated_plan
from hetpipe.plan.planner import make_plan
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.pricing import predict
from hetpipe.plan.proposal import PlannerOptions, Proposal
from hetpipe.profile import measure
from hetpipe.profile.drift import (
    Correction,
    correct_for_drift,
    drifts_since,
    mean_correction,
    probe_again,
    probes_of,
)
from hetpipe.profile.measure import profile
from hetpipe.profile.probing import NBYTES, ORDERS, Probes, median_probe

THEN = Probe(2e-3, 4e-3, 0.0, 256, 1 << 20)


def probed(table: CostTable, **changes: Any) -> CostTable:
    """Return the table with the same probe, and these fields, on every device."""
    devices = {id: replace(cost, probe=THEN, **changes) for id, cost in table.devices.items()}
    return replace(table, devices=devices)


def later(**factors: float) -> dict[str, Probe]:
    """Return the probes after these drifts."""
    return {id: THEN.scaled(factor, factor) for id, factor in factors.items()}


def test_a_drift_is_between_arithmetic_and_memory() -> None:
    measured = drift(THEN, THEN.scaled(1.0, 4.0))
    assert measured == Drift(1.0, pytest.approx(4.0))
    assert measured.factor == pytest.approx(2.0)
    assert measured.spread > 0.3
    assert drift(THEN, THEN.scaled(2.0, 2.0)).spread == 0.0


def test_a_change_within_the_noise_is_no_drift() -> None:
    then = replace(THEN, spread=0.03)
    assert drift(then, replace(THEN.scaled(1.04, 0.96), spread=0.04)) == Drift(
        1.0, 1.0, pytest.approx(0.05)
    )
    beyond = drift(then, replace(THEN.scaled(1.1, 2.0), spread=0.04))
    assert beyond.arithmetic == pytest.approx(1.1 ** (1 - (0.05 / math.log(1.1)) ** 2))
    assert 1.99 < beyond.memory < 2.0


def test_all_turns_correct_a_row() -> None:
    def at(corrected_s: float) -> Correction:
        return Correction(1.0, corrected_s, (0.5 * corrected_s, 2 * corrected_s), {"a": 1.5})

    row: Any = object.__new__(PipelineRow)
    row.task = SimpleNamespace(mini_batch=1)
    row.steps_s = [6.0, 1.0, 2.0]
    row.corrections = [(at(3.0), at(6.0)), (at(1.0), at(2.0)), (at(2.0), at(4.0))]
    assert row.measured_s == pytest.approx(2.0)
    correction = row.correction  # predicted in sum: 9 s; measured: 9 s
    assert correction.raw_s == 1.0
    assert correction.corrected_s == pytest.approx(2.0)
    assert correction.interval_s == pytest.approx((1.0, 4.0))
    assert correction.drifts == pytest.approx({"a": 1.5})
    blind = Correction(1.0, 1.0, None, {})
    assert mean_correction([blind, blind]) == blind
    assert blind.scaled(2.0) == replace(blind, corrected_s=2.0)


def test_a_median_probe_has_the_spread_of_all_probes() -> None:
    probes = [replace(THEN.scaled(factor, 1.0), spread=9.0) for factor in (1.0, 1.1, 0.9, 1.0, 5.0)]
    median = median_probe(probes)
    assert (median.arithmetic_s, median.memory_s) == (THEN.arithmetic_s, THEN.memory_s)
    assert median.spread == pytest.approx(0.05)
    assert median_probe(probes[:1]) == probes[0]


def test_costs_with_probes_survive_json() -> None:
    table = probed(make_table({"a": 1.0, "b": 0.5}), probe_alone=THEN, alone=0.75, spread=0.125)
    assert CostTable.from_json(json.loads(json.dumps(table.to_json()))) == table


def test_costs_after_a_drift_have_new_probes() -> None:
    table = probed(make_table({"a": 1.0, "b": 0.5}))
    present = table.drifted({"a": Drift(2.0, 2.0, 0.1)})
    assert present.devices["b"] == table.devices["b"]
    assert present.forward_s("a", 0, 3) == 2 * table.forward_s("a", 0, 3)
    assert present.devices["a"].spread == pytest.approx(0.1)
    again = drifts_since(present, later(a=2.0, b=1.0), 2)
    assert [one.factor for one in again.values()] == [1.0, 1.0]


@pytest.mark.parametrize(("slower", "factor"), [({"a": 2.0, "b": 2.0}, 2.0), ({}, 1.0)])
def test_a_prediction_is_corrected(slower: Mapping[str, float], factor: float) -> None:
    table = probed(make_table({"a": 1.0, "b": 0.5}))
    plan = make_plan(table, ["a", "b"], mini_batch=16, microbatches=4)
    correction = correct_for_drift(plan, table, later(**slower))
    assert correction.raw_s == plan.step_s
    assert correction.corrected_s == pytest.approx(factor * plan.step_s)
    assert correction.drifts == pytest.approx(slower)
    assert (f"corrected for drift {1e3 * correction.corrected_s:.1f}" in str(correction)) == bool(
        slower
    )


def test_the_slowest_replica_corrects_a_prediction() -> None:
    tables = {4: probed(make_table({"a": 1.0, "b": 1.0})),
              8: probed(make_table({"a": 1.0, "b": 1.0}, samples=8))}  # fmt: skip
    plan = plan_by(tables, Proposal((), (("a", "b"),), "gpipe", 2), 16)
    correction = correct_for_drift(plan, tables[8], later(a=1.0, b=3.0))
    assert correction.corrected_s == pytest.approx(3 * plan.step_s)


def test_a_device_that_computes_alone_is_faster() -> None:
    """Costs hold the times with all devices computing; the planner knows how much faster one is
    alone."""
    table = probed(make_table({"a": 1.0, "b": 0.25}), alone=0.5, probe_alone=THEN.scaled(0.5, 0.5))
    alone = make_plan(table, ["a"], mini_batch=16, microbatches=4)
    both = make_plan(table, ["a", "b"], mini_batch=16, microbatches=4)
    plain = make_table({"a": 1.0, "b": 0.25})
    assert alone.step_s == make_plan(plain, ["a"], mini_batch=16, microbatches=4).step_s / 2
    assert both.step_s == make_plan(plain, ["a", "b"], mini_batch=16, microbatches=4).step_s
    cluster, options = Cluster.with_ids("ab"), PlannerOptions(16, replicas=False)
    assert plan_on({4: table}, cluster, options).all_devices == ("a",)
    assert plan_on({4: plain}, cluster, options).all_devices == ("a", "b")
    for plan in (alone, both):  # the timeline agrees with the plan
        assert predict(plan, table).total_s == pytest.approx(plan.step_s)
        assert correct_for_drift(plan, table, {}).corrected_s == plan.step_s
    assert correct_for_drift(alone, table, later(a=0.5)).corrected_s == pytest.approx(alone.step_s)
    assert correct_for_drift(both, table, later(a=1.0, b=1.0)).corrected_s == pytest.approx(
        both.step_s
    )


def test_two_of_three_devices_have_intermediate_times() -> None:
    table = probed(make_table({"a": 1.0, "b": 1.0, "c": 1.0}), alone=0.5, probe_alone=THEN)
    times_s = [table.beside(count).forward_s("a", 0, 1) for count in (1, 2, 3)]
    assert times_s == [0.5, 0.75, 1.0]
    assert table.beside(2).beside(2) == table.beside(2)
    tables = {samples: replace(table, samples=samples) for samples in (1, 2, 4, 8)}
    whole = replicated_plan(tables, ["a", "b", "c"], mini_batch=12, microbatches=1)
    two = replicated_plan(tables, ["a", "b"], mini_batch=12, microbatches=1)
    assert two.stages[0].forward_s == pytest.approx(0.75 * whole.stages[0].forward_s)


@pytest.fixture
def crew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Start two devices in this process."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    members = (Member("a", "numpy:cpu:0"), Member("b", "pytorch:cpu:0"))
    with Crew.start(Cluster(members, transport="local")) as crew:
        yield crew


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Captured:
    """Return a captured model, to be profiled as if no other work disturbed it."""
    monkeypatch.setattr(measure.contention, "foreign_share", lambda before, after: 0.0)
    torch.manual_seed(0)
    return Captured(MLP(), F.cross_entropy, (torch.randn(8, 20), torch.randint(0, 5, (8,))))


def test_later_probes_run_the_programs_of_the_first(crew: Crew) -> None:
    with Probes(crew, ["a", "b"]) as probes:
        first, alone = probes.together(2), probes.alone("b")
    assert list(first) == ["a", "b"]
    assert alone is not None
    table = make_table({"a": 1.0, "b": 1.0})
    devices = {id: replace(table.devices[id], probe=probe) for id, probe in first.items()}
    again = probe_again(crew, replace(table, devices=devices), ["a", "b"])
    for member, probe in again.items():
        assert (probe.order, probe.nbytes) == (first[member].order, first[member].nbytes)
    assert probe_again(crew, table, ["a", "b"]) == {}, "costs without a probe have no drift"


@pytest.mark.slow
def test_stored_costs_are_corrected_when_they_are_used(
    crew: Crew, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small drift changes no stored costs, so that plans stay equal."""
    efforts: list[Any] = []
    first = profile(captured, crew, hp.optim.sgd(0.1), [4], report=efforts.append)[4]
    assert efforts[0].layers == len(first.layers)
    for id, cost in first.devices.items():
        assert cost.probe is not None, id
        assert cost.probe_alone is not None, id
        assert 0 < cost.alone <= 1
    factors = {"a": 50.0, "b": 1.02}
    drifted = {
        id: cost.probe.scaled(factors[id], factors[id])
        for id, cost in first.devices.items()
        if cost.probe is not None
    }
    monkeypatch.setattr(measure, "probe_again", lambda crew, table, members: drifted)
    again = profile(captured, crew, hp.optim.sgd(0.1), [4], report=efforts.append)[4]
    assert len(efforts) == 1, "nothing was measured"
    assert again.devices["b"] == first.devices["b"]
    factor = drifts_since(first, drifted, 2)["a"].factor
    assert factor > 2.0
    assert again.forward_s("a", 0, 2) == pytest.approx(factor * first.forward_s("a", 0, 2))


@pytest.mark.slow
def test_each_profile_is_probed_with_its_programs(
    crew: Crew, captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:

    def programs(samples: int, enough_s: float, *others: int) -> list[tuple[int, int]]:
        """Return the sizes of the probes of these costs, with the minimum duration `enough_s`."""
        monkeypatch.setattr("hetpipe.profile.probing.ENOUGH_S", enough_s)
        tables = profile(captured, crew, hp.optim.sgd(0.1), [samples, *others])
        return [(one.order, one.nbytes) for one in probes_of(tables[samples]).values()]

    short, long = programs(4, 0.0), programs(2, 4e-3)
    assert short == 2 * [(ORDERS[0], NBYTES[0])] != long
    assert programs(1, 0.0, 2) == long, "new costs have the programs of those that are there"
    assert programs(4, 0.0, 2, 1) == short
