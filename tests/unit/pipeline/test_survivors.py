"""The plan and its costs after a loss, by known costs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_sizes_between import CLUSTER, LAYERS, MEMBERS, table

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.errors import CaptureError, PlanError, WorkerError
from hetpipe.pipeline.forwards import Forwards
from hetpipe.pipeline.survivors import TRIES, ErrorCount, plan_for
from hetpipe.plan.building import replicated_plan
from hetpipe.plan.planner import make_plan
from hetpipe.plan.planners.auto import plan as plan_on
from hetpipe.plan.proposal import PlannerOptions

UNUSED: Any = None
"""A captured model, which only plans with the whole model on every member need."""


def tables_with_dear_messages() -> dict[int, CostTable]:
    """Return costs by which replicas, whose gradients are small, are faster than stages."""
    tables = {size: table(size, 0.0) for size in (4, 8)}
    for size, costs in tables.items():
        links = {pair: replace(link, latency_s=100.0) for pair, link in costs.links.items()}
        tables[size] = replace(costs, links=links)
    return tables


def test_the_costs_have_the_size_of_the_plan() -> None:
    """The size may have been interpolated between two measured ones."""
    tables = {size: table(size, 3.0) for size in (2, 16)}
    before = make_plan(table(8, 3.0), MEMBERS, mini_batch=64, microbatches=8)
    plan, costs = plan_for(UNUSED, Cluster.with_ids(MEMBERS[:1]), before, before, tables, [8])
    assert plan.all_devices == ("m0",)
    assert costs.samples == plan.share_samples == 8


def test_a_plan_without_replicas_gets_none() -> None:
    """Replicas could not divide the small mini-batches that the first plan can train."""
    tables = tables_with_dear_messages()
    before = make_plan(tables[8], MEMBERS[:1], mini_batch=64, microbatches=8)
    plan, _ = plan_for(UNUSED, CLUSTER, before, before, tables, [8])
    assert plan.replicas == (1,) * len(plan.stages)


@pytest.mark.parametrize(
    ("sizes", "needed", "replicas"),
    [([8, 2], 1, 2), ([8, 1], 1, 1), ([8, 4], 2, 2), ([8, 3], 2, 1), ([], 1, 2)],
)
def test_replicas_can_train_the_smallest_micro_batch(
    sizes: list[int], needed: int, replicas: int
) -> None:
    """The model needs some rows: two, if it has a batch norm. It may have no training."""

    def layer_graph(rows: int) -> None:
        if rows < needed:
            raise CaptureError("too few rows")

    captured: Any = SimpleNamespace(layer_graph=layer_graph)
    tables = tables_with_dear_messages()
    before = plan_on(tables, CLUSTER, PlannerOptions(64, (8,), ("1f1b",)))
    assert before.replicas == (2,)
    present = make_plan(tables[8], MEMBERS[:1], mini_batch=64, microbatches=8)
    plan, _ = plan_for(captured, CLUSTER, before, present, tables, sizes)
    assert max(plan.replicas) == replicas


def four_members(slow: str = "", samples: int = 8) -> CostTable:
    """Return costs of four members, one of which may be slow."""
    costs, members = table(samples, 0.0), [f"m{n}" for n in range(4)]
    row = costs.devices["m0"]
    late = replace(row, layers=tuple(replace(each, forward_s=99.0) for each in row.layers))
    links = {(a, b): LinkCost(0.0, 1e12) for a in members for b in members if a != b}
    devices = {id: late if id == slow else row for id in members}
    return replace(costs, devices=devices, links=links)


def test_the_fastest_unused_member_takes_the_place_of_a_lost_one() -> None:
    tables = {8: four_members(slow="m2")}
    before = make_plan(tables[8], MEMBERS, mini_batch=64, microbatches=8)
    plan, _ = plan_for(UNUSED, Cluster.with_ids(["m0", "m2", "m3"]), before, before, tables, [8])
    assert plan.cuts == before.cuts
    assert plan.devices == tuple(id if id == "m0" else "m3" for id in before.devices)


def test_an_unused_member_takes_the_place_if_no_plan_is_found() -> None:
    """The costs know only the rows of a replica, so no plan without replicas has a price, and
    others could not divide small mini-batches."""
    tables = {4: four_members(samples=4)}
    before = replicated_plan(tables, MEMBERS, mini_batch=64, microbatches=8)
    cluster = Cluster.with_ids(["m1", "m2"])

    def layer_graph(rows: int) -> None:
        raise CaptureError("too few rows")

    captured: Any = SimpleNamespace(name="case", layer_names=LAYERS, layer_graph=layer_graph)
    plan, _ = plan_for(captured, cluster, before, before, tables, [8])
    assert {*plan.all_devices} == {"m1", "m2"}
    with pytest.raises(PlanError, match="of 4 to 4 samples, not of 8"):
        plan_for(captured, Cluster.with_ids(["m1"]), before, before, tables, [8])


def test_a_plan_keeps_the_notes_that_name_no_member() -> None:
    tables = {8: four_members()}
    notes = ("m1 is left out: a step is longer with it", "two snapshots take 4 MiB")
    before = replace(make_plan(tables[8], MEMBERS, mini_batch=64, microbatches=8), notes=notes)
    plan, _ = plan_for(UNUSED, Cluster.with_ids(["m1"]), before, before, tables, [8])
    assert plan.notes == notes[1:]


def test_a_plan_may_recompute_as_the_first_one_did() -> None:
    costs = four_members()
    bytes_of = tuple(replace(each, saved_nbytes=1000) for each in costs.layers)
    rows = {id: replace(row, memory_nbytes=8000) for id, row in costs.devices.items()}
    tables = {8: replace(costs, layers=bytes_of, devices=rows)}
    options = PlannerOptions(64, (8,), ("1f1b",))
    first = plan_on(tables, Cluster.with_ids([*MEMBERS, "m2"]), options)
    before = replace(first, recompute=True)
    plan, _ = plan_for(UNUSED, Cluster.with_ids(["m1", "m2"]), before, before, tables, [8])
    assert plan.recompute


def test_errors_are_counted_by_mini_batch() -> None:
    errors = ErrorCount()
    for number in (3, 4, 4):
        errors.add(WorkerError("an error"), number)
    with pytest.raises(WorkerError, match=f"this was error {TRIES} at the same mini-batch"):
        errors.add(WorkerError("an error"), 4)


def test_forwards_that_are_repeated_twice_have_each_result_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A result may arrive before a second loss, and its mini-batch is computed again after it."""
    forwards: Any = object.__new__(Forwards)
    forwards._under_way, forwards._results = [("request", 1), ("request", 2)], ["earlier"]
    admitted = []

    def admit(leaves: Any) -> None:
        admitted.append(leaves)
        if len(admitted) == 2:
            forwards._results.append("early")
            raise WorkerError("another loss")

    monkeypatch.setattr(forwards, "begin", lambda: None)
    monkeypatch.setattr(forwards, "admit", admit)
    with pytest.raises(WorkerError):
        forwards.repeat()
    assert forwards._results == ["earlier"]
    assert [leaves for _, leaves in forwards._under_way] == [1, 2]
