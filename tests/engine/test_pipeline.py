"""The interface of Pipeline, on small models and devices that every machine has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import Crews
from models import CASES, MLP
from pipelines import user_pipeline
from reference import Parameters, check_close, train
from torch import nn

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import CaptureError, HetpipeError, PlanError, UnsupportedOperatorError

DEVICES = ("pytorch:cpu:0", "numpy:cpu:0")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP()


def batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 20, generator=generator)
    return x, torch.randint(0, 5, (rows,), generator=generator)


def sgd(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def open_planned(
    crew: Crew, model: nn.Module, loss_fn: Any = F.cross_entropy, example: Any = None,
    **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline that captures and profiles the model and plans, as a user does."""
    options = {"optimizer": hp.optim.sgd(lr=0.1, momentum=0.9), "microbatches": 4, **options}
    return user_pipeline(crew, model, loss_fn, example or batch(12), **options)


@pytest.mark.slow
def test_state_dict_equals_eager_after_training(crew: Crew) -> None:
    case = CASES["tied_autoencoder"]
    torch.manual_seed(0)
    model = case.model()
    generator = torch.Generator().manual_seed(1)
    batches = [case.batch(generator) for _ in range(4)]
    expected = train(model, case.loss_fn, batches, 4, lambda p: torch.optim.AdamW(p, lr=1e-2))
    with open_planned(
        crew, model, case.loss_fn, batches[0], optimizer=hp.optim.adamw(lr=1e-2), cuts=[2]
    ) as pipe:
        for x, y in batches:
            pipe.step(x, y)
        state = pipe.state_dict()
    assert list(state) == list(expected.state)
    check_close(state, expected.state)


@pytest.mark.slow
def test_smaller_mini_batches_run_with_fewer_micro_batches(crew: Crew) -> None:
    """The batches have 12 rows, then 7 (as 2, 2, 2, 1), then 3 (as 1, 1, 1), then 12 again."""
    model = mlp()
    batches = [batch(rows, seed) for seed, rows in enumerate((12, 7, 3, 12))]
    expected = train(model, F.cross_entropy, batches, 4, sgd)
    with open_planned(crew, model, cuts=[2]) as pipe:
        losses = [result.loss for result in pipe.run(batches)]
    assert losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.slow
def test_a_sum_and_count_loss_weighs_by_count(crew: Crew) -> None:
    """Samples with label 0 do not count, so micro-batches have unequal weights in the mean."""

    def summed(output: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        counted = (y != 0).float()
        return (F.cross_entropy(output, y, reduction="none") * counted).sum(), counted.sum()

    model, data = mlp(), [batch(12, seed) for seed in range(3)]
    expected = train(model, summed, data, 1, sgd)
    with open_planned(crew, model, summed, cuts=[2]) as pipe:
        losses = [pipe.step(x, y) for x, y in data]
    assert losses == pytest.approx(expected.losses, rel=1e-5)


@pytest.mark.slow
def test_planner_chooses_and_predicts(crew: Crew) -> None:
    with open_planned(crew, mlp(), microbatches=None) as pipe:
        counts = (2,) if max(pipe.plan.replicas) > 1 else (4, 6, 12)  # with two replicas, half each
        assert pipe.plan.microbatches in counts
        assert pipe.plan.step_s > 0
        assert pipe.predicted.total_s == pytest.approx(pipe.plan.step_s)
        with pytest.raises(HetpipeError, match="no step"):
            _ = pipe.timeline
        pipe.step(*batch(12))
        assert pipe.timeline.step_s > 0


class WithHypot(nn.Module):
    """The first layer has an operator that the numpy backend lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return self.last(torch.hypot(hidden, hidden + 1))


@pytest.mark.slow
@pytest.mark.parametrize("given", ["cuts", "plan"])
def test_the_error_names_the_operator_and_a_device_that_has_it(
    crew: Crew, crews: Crews, given: str
) -> None:
    """The error also names the layer; a free planner gives that layer to the other device."""
    with open_planned(crew, WithHypot()) as pipe:
        assert pipe.plan.devices[0] == "m0"
        whole = pipe.plan
    options = {"cuts": [1]} if given == "cuts" else {"plan": whole, "microbatches": None}
    other = crews(DEVICES[::-1])  # the order of the devices is reversed, so m0 is numpy
    message = r"numpy:cpu:0 cannot run aten.hypot.default of layer first: .* \(m1 can\)"
    with pytest.raises(PlanError, match=message):
        open_planned(other, WithHypot(), priced=True, **options)


def test_loading_names_an_operator_missing_in_an_unpriced_plan() -> None:
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(DEVICES[::-1]))
    cluster = Cluster(members, transport="local")
    message = "numpy:cpu:0 cannot run aten.hypot.default of layer first: the reference has no"
    with Crew.start(cluster) as crew, pytest.raises(UnsupportedOperatorError, match=message):
        open_planned(crew, WithHypot(), cuts=[1], schedule="1f1b")


@pytest.mark.slow
def test_plan_of_another_model_is_refused(crew: Crew) -> None:
    with open_planned(crew, mlp(), cuts=[2]) as pipe:
        plan, costs = pipe.plan, pipe.costs
    torch.manual_seed(0)
    other = nn.Sequential(nn.Linear(20, 9), nn.Linear(9, 5))
    with pytest.raises(PlanError, match="plan is for 4 layers, the model has 2"):
        open_planned(crew, other, plan=plan, costs=costs, microbatches=None)
    with pytest.raises(HetpipeError, match="the plan already contains cuts, microbatches"):
        open_planned(crew, mlp(), plan=plan, costs=costs, cuts=[1])


@pytest.mark.slow
def test_data_parallel_in_stages_trains_as_torch(crew: Crew) -> None:
    model, data = mlp(), [batch(12, seed) for seed in range(3)]
    expected = train(model, F.cross_entropy, data, 2, sgd)
    options = {"schedule": "data-parallel", "microbatches": 2, "cuts": [2]}
    with open_planned(crew, model, **options) as pipe:
        assert [stage.devices for stage in pipe.plan.stages] == [("m0", "m1")] * 2
        assert [pipe.step(x, y) for x, y in data] == pytest.approx(expected.losses, rel=1e-5)
        assert pipe.predicted.step_s > 0
    with pytest.raises(PlanError, match=r"replicas are \[1, 2\], but .* each of 2 devices"):
        open_planned(crew, model, **options, replicas=[1, 2])
    with pytest.raises(HetpipeError, match="data-parallel is synchronous and weights='stash' does"):
        open_planned(crew, model, **options, weights="stash")


def test_more_stages_than_layers_are_refused(crew: Crew) -> None:
    with pytest.raises(PlanError, match="the model has one layer, model, and cannot be cut"):
        open_planned(crew, nn.Linear(20, 5), cuts=[1])


@pytest.mark.slow
def test_a_batch_of_another_structure_is_refused(crew: Crew) -> None:
    with open_planned(crew, mlp(), cuts=[2]) as pipe, pytest.raises(HetpipeError, match="20"):
        pipe.step(torch.zeros(12, 21), torch.zeros(12, dtype=torch.int64))


def test_the_error_for_an_unexportable_model_names_the_line(crew: Crew) -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(20, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                x = -x
            return self.linear(x)

    with pytest.raises(CaptureError, match=r"test_pipeline\.py:\d+"):
        open_planned(crew, Branching())
