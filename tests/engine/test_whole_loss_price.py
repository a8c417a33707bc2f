"""The price of a loss over whole mini-batches, in plans, timelines, explanations and files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from priced import table_of
from test_boards_in_loop import cluster_of
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.capture.whole_loss import WholeLossCaptured
from hetpipe.cluster import Cluster, Member
from hetpipe.cost.board import board
from hetpipe.cost.loss import LossCost
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.errors import CostError, PlanError
from hetpipe.plan.pricing import predict
from hetpipe.profile import losses
from hetpipe.schedule.action import Op
from hetpipe.simulate.timeline import Timeline
from hetpipe.study import comparison, subject

ROWS, WIDTH = 12, 4
CAUSE = "the loss of the mini-batch, outside of the devices"


def pairs(out: Tensor, y: Tensor) -> Tensor:
    """A loss in which every sample meets all others."""
    return (out @ out.t()).logsumexp(1).mean()


def case() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    return model, (torch.randn(ROWS, WIDTH), torch.zeros(ROWS))


def opened(crew: Crew, **options: Any) -> hp.Pipeline:
    model, example = case()
    options = {"optimizer": hp.optim.sgd(0.1), "cuts": [2], "microbatches": 3, **options}
    return hp.Pipeline(
        model, pairs, example, cluster=crew.cluster, crew=crew, loss_over="mini-batch", **options
    )


def waits(timeline: Timeline) -> list[tuple[str, float]]:
    return [
        (str(span.action), span.end_s - span.start_s)
        for span in timeline.spans
        if span.action.op is Op.LOSS
    ]


def test_a_step_contains_the_loss(crew: Crew, priced: None) -> None:
    with opened(crew, priced=True) as pipe:
        explained = pipe.explain()
        costs, plan = explained.costs, pipe.plan
        assert costs is not None
        cost = costs.whole_loss["m1"]
        assert min(cost.outputs_s, cost.loss_s, cost.gradients_s) > 0
        assert (cost.travel, cost.loss) == ("measured", "measured")
        assert str(cost) in plan.notes
        without = replace(costs, whole_loss={})
        assert plan.step_s == pytest.approx(predict(plan, without).total_s + cost.total_s)
        assert waits(pipe.predicted) == [("1L", pytest.approx(cost.total_s))]
        assert CAUSE in explained.devices[1].waits
        assert "instead of gpipe" not in str(explained)
        _, example = case()
        pipe.step(*example)
        assert [name for name, _ in waits(pipe.timeline)] == ["1L"]
        assert CAUSE in pipe.explain().devices[1].waits


def test_other_pipelines_have_no_such_price(crew: Crew, priced: None) -> None:
    model, example = case()
    options = {"cuts": [2], "microbatches": 3, "schedule": "gpipe", "priced": True}
    with hp.Pipeline(
        model, lambda out, y: out.square().mean(), example, cluster=crew.cluster, crew=crew,
        optimizer=hp.optim.sgd(0.1), **options,
    ) as pipe:  # fmt: skip
        assert not waits(pipe.predicted)
        costs = pipe.explain().costs
        assert costs is not None
        assert not costs.whole_loss
        assert "whole_loss" not in costs.to_json()


def test_forwards_alone_have_no_such_price(crew: Crew, priced: None) -> None:
    with opened(crew, priced=True, optimizer=None) as pipe:
        assert not any("the loss of the mini-batch" in note for note in pipe.plan.notes)
        assert not waits(pipe.predicted)


def test_studies_plan_only_with_gpipe() -> None:
    """The plans of all planners contain the loss; a plan for another mini-batch is refused."""
    price = LossCost(8, 0.1, 0.2, 0.3)
    costs = replace(table(["a", "b"]), whole_loss={"a": price, "b": price})
    cluster = Cluster((Member("a", "numpy:cpu:0"), Member("b", "numpy:cpu:0")))
    found, _ = subject.plan(subject.of_table(costs, 8), cluster)
    assert found.schedule == "gpipe"
    without = replace(costs, whole_loss={})
    assert found.step_s == pytest.approx(predict(found, without).total_s + 0.6)
    rows = comparison.compare(subject.of_table(costs, 8), cluster).rows
    assert {row.plan.schedule for row in rows if row.plan} == {"gpipe"}
    assert any("choose gpipe" in row.why_not for row in rows)
    with pytest.raises(PlanError, match="priced for mini-batches of 8 samples, not 4"):
        subject.plan(subject.of_table(costs, 4), cluster)


def test_links_to_the_host_are_measured_once(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    first = losses.host_link(crew, "m0")
    assert first.label == "measured"
    monkeypatch.setattr(losses, "_one_way_s", lambda *_: pytest.fail("measured again"))
    assert losses.host_link(crew, "m0") == first


def test_disturbed_forwards_spoil_no_link(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward alone then seems to take longer than the forward with both ways."""
    monkeypatch.setattr(Crew, "call_each", lambda *_: {"m0": [10.0]})
    assert losses._one_way_s(crew, "m0", 4096) > 0
    monkeypatch.setattr(Crew, "call_each", lambda *_: {"m0": "it has no expand"})
    with pytest.raises(CostError, match=r"m0 \(numpy:cpu:0\) cannot run .*: it has no expand"):
        losses._one_way_s(crew, "m0", 4096)


def test_a_boards_link_to_the_host_is_modelled(tmp_path: Path) -> None:
    with Crew.start(cluster_of(tmp_path)) as crew:
        captured = WholeLossCaptured(case()[0], pairs, case()[1])
        tables = losses.LossPrices(captured, crew).added(lambda sizes: {4: table(["gpu", "fpga"])})
        costs = tables([4])[4].whole_loss
        own = board("v100-sxm-16")
        way_s = own.launch_s + ROWS * WIDTH * 4 / own.host_Bps
        assert costs["gpu"].outputs_s == costs["gpu"].gradients_s == pytest.approx(way_s)
        assert costs["gpu"].travel == costs["fpga"].travel == "modelled"
        assert costs["gpu"].loss == "measured"


def table(members: list[str]) -> CostTable:
    return table_of(["one", "two"], members, 4)


def test_a_table_with_the_price_survives_a_file() -> None:
    price = LossCost(12, 1e-3, 2e-3, 3e-3, "modelled", "measured")
    costs = replace(table(["a", "b"]), whole_loss={"a": price, "b": price})
    data = costs.to_json()
    assert CostTable.from_json(data) == costs
    del data["whole_loss"]["b"]
    with pytest.raises(CostError, match="whole_loss has a, the table a, b: give all or none"):
        CostTable.from_json(data)
