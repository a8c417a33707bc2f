"""A pipeline without an optimizer predicts and evaluates, and needs less memory than a training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import shared
from crews import Crews
from engine_backends import EarlyBackend
from models import MLP, Normalized, batches
from torch import nn

import hetpipe as hp
from hetpipe.capture.captured import CapturedForwards
from hetpipe.cluster import Cluster, Link, Member
from hetpipe.cost.board import board
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.profile.measure import profile
from hetpipe.schedule.action import FORWARDS
from hetpipe.sdk.host import registry

DEVICES = ("pytorch:cpu:0", "numpy:cpu:0")
DATA = batches(3)
FIXED: dict[str, Any] = {"cuts": [3], "microbatches": 2, "schedule": "1f1b"}


def opened(crew: Crew, model: nn.Module, loss_fn: Any = F.cross_entropy, **options: Any) -> Any:
    example = DATA[0] if loss_fn else (DATA[0][0], None)
    return hp.Pipeline(model, loss_fn, example, cluster=crew.cluster, crew=crew, **options)


def seeded(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


@pytest.mark.parametrize("replicas", [None, [2]])
def test_outputs_and_losses_equal_torchs(crew: Crew, replicas: Any) -> None:
    plain = seeded(Normalized).eval()
    plan = {"cuts": [1], "schedule": "1f1b"} if replicas is None else {"replicas": replicas}
    with opened(crew, seeded(Normalized).eval(), microbatches=4, **plan) as pipe:
        for x, y in DATA:
            torch.testing.assert_close(pipe.predict(x), plain(x).detach())
            assert pipe.evaluate([(x, y)]).loss == pytest.approx(
                F.cross_entropy(plain(x), y).item(), rel=1e-6
            )
        torch.testing.assert_close(pipe.predict(x[:5]), plain(x[:5]).detach())
        if replicas:
            with pytest.raises(HetpipeError, match="one of them would get no sample"):
                pipe.predict(x[:1])
        other = Normalized()
        pipe.copy_to(other)
    assert all(torch.equal(v, plain.state_dict()[n]) for n, v in other.state_dict().items())


def test_without_a_loss_it_only_predicts(crew: Crew) -> None:
    plain = seeded(MLP)
    with opened(crew, seeded(MLP), None, **FIXED) as pipe:
        for output, (x, _) in zip(pipe.predict_batches(x for x, _ in DATA), DATA, strict=True):
            torch.testing.assert_close(output, plain(x).detach())
        with pytest.raises(HetpipeError, match=r"evaluate\(\): this pipeline has no loss_fn"):
            pipe.evaluate(DATA)
    with pytest.raises(HetpipeError, match="loss_fn is None, and a training needs a loss"):
        opened(crew, MLP(), None, optimizer=hp.optim.adamw())


def test_what_trains_is_refused_by_name(crew: Crew, tmp_path: Path) -> None:
    x, y = DATA[0]
    with opened(crew, MLP(), **FIXED) as pipe:
        calls: dict[str, Callable[[], Any]] = {
            "step": lambda: pipe.step(x, y),
            "run": lambda: list(pipe.run(DATA)),
            "gradients": lambda: pipe.gradients(x, y),
            "diagnose": lambda: pipe.diagnose(x, y),
            "save": lambda: pipe.save(tmp_path),
            "rebalance": pipe.rebalance,
        }
        for name, call in calls.items():
            with pytest.raises(HetpipeError, match=rf"{name}\(\): this pipeline has no optimizer"):
                call()
    with pytest.raises(HetpipeError, match="no optimizer, so clip_norm, ema would have no effect"):
        opened(crew, MLP(), ema=0.9, clip_norm=1.0)
    captured = shared(MLP(), F.cross_entropy, DATA[0])
    with pytest.raises(HetpipeError, match="captured is for a training"):
        opened(crew, MLP(), captured=captured)


def test_a_checkpoint_of_a_training_predicts(crew: Crew, tmp_path: Path) -> None:
    x, y = DATA[0]
    with opened(crew, seeded(MLP), optimizer=hp.optim.adamw(lr=0.01), ema=0.9, **FIXED) as pipe:
        pipe.step(x, y)
        pipe.save(tmp_path)
        expected = pipe.predict(x)
    options = {"cluster": crew.cluster, "crew": crew}
    with hp.Pipeline.load(tmp_path, MLP(), F.cross_entropy, DATA[0], **options) as pipe:
        assert torch.equal(pipe.predict(x), expected)


class Scaled(nn.Module):
    """A loss with a parameter, which a prediction does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output * self.scale, y)


def test_a_checkpoint_has_values_that_no_prediction_reads(crew: Crew, tmp_path: Path) -> None:
    """In eval mode nothing reads a batch norm's count of mini-batches."""
    plan = {"cuts": [1], "schedule": "1f1b", "microbatches": 2}
    x, y = DATA[0]
    with opened(crew, seeded(Normalized), Scaled(), optimizer=hp.optim.sgd(0.1), **plan) as pipe:
        pipe.step(x, y)
        pipe.save(tmp_path)
        expected, right, loss = pipe.predict(x), pipe.state_dict(), pipe.evaluate(DATA).loss
    options = {"cluster": crew.cluster, "crew": crew}
    with hp.Pipeline.load(tmp_path, Normalized().eval(), Scaled(), DATA[0], **options) as pipe:
        assert torch.equal(pipe.predict(x), expected)
        assert pipe.evaluate(DATA).loss == pytest.approx(loss, rel=1e-6)
        state = pipe.state_dict()
        assert all(torch.equal(value, right[name]) for name, value in state.items())
        assert any(name.endswith("num_batches_tracked") for name in state)
    deeper = nn.Sequential(Normalized(), nn.Linear(5, 5))
    with pytest.raises(HetpipeError, match="checkpoint is of another model"):
        hp.Pipeline.load(tmp_path, deeper, Scaled(), DATA[0], cuts=[1], microbatches=2,
                         schedule="1f1b", **options)  # fmt: skip


def test_each_size_is_compiled_once_for_each_kind_of_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(EarlyBackend)
    members = tuple(Member(f"m{n}", "early:cpu:0") for n in range(2))
    with Crew.start(Cluster(members, transport="local")) as crew:

        def compiled() -> set[str]:
            calls = crew.call(["m0", "m1"], "engine_backends:forecasts")
            return {graph for _, graphs in calls for graph in graphs}

        captured = CapturedForwards(seeded(MLP), F.cross_entropy, DATA[0], samples=6)
        with opened(crew, seeded(MLP), captured=captured, **FIXED) as pipe:
            predicting = compiled()
            assert len(predicting) == 2  # stages
            pipe.predict(DATA[0][0])
            assert not compiled()
            pipe.evaluate(DATA)
            assert len(compiled() - predicting) == 1  # the last stage, with the loss
        assert captured.exports == 1


def boards() -> Cluster:
    members = tuple(Member(f"b{n}", "", board="vcu118", numerics="numpy:cpu:0") for n in range(2))
    return Cluster(members, {frozenset(("b0", "b1")): Link(1e-5, 1e9)}, "local")


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_the_plan_counts_the_bytes_that_forwards_hold(
    schedule: str,
) -> None:
    """No gradients, no second version of the weights; the leaf of the batch is not counted."""
    x = DATA[0][0]
    count = 2 if schedule == "1f1b" else 1
    options: dict[str, Any] = {"cuts": [3], "microbatches": count, "schedule": schedule}
    with hp.Pipeline(seeded(MLP), None, (x, None), cluster=boards(), **options) as pipe:
        pipe.predict(x)
        planned = [stage.memory_nbytes for stage in pipe.plan.stages]
        leaf = x[: len(x) // count].nbytes
        assert [*pipe.peak_nbytes] == [planned[0] + leaf, planned[1]]


class Tied(nn.Module):
    """A language model whose output weights are its token embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(30, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 30, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.inner(self.words(x)).tanh())
        return output


@pytest.mark.parametrize("cuts", [[], [1]], ids=["one stage", "two stages"])
def test_a_shared_parameter_counts_once_in_a_stage_and_is_not_sent(cuts: list[int]) -> None:
    x = torch.randint(30, (4, 3))
    options: dict[str, Any] = {"cuts": cuts, "microbatches": 2, "schedule": "1f1b"}
    model = seeded(Tied)
    with hp.Pipeline(model, None, (x, None), cluster=boards(), **options) as pipe:
        torch.testing.assert_close(pipe.predict(x), model(x).detach())
        planned = [stage.memory_nbytes for stage in pipe.plan.stages]
        assert [*pipe.peak_nbytes] == [planned[0] + x[:2].nbytes, *planned[1:]]
        assert {span.action.op for span in pipe.predicted.spans} <= FORWARDS


def test_a_board_predicts_with_a_model_that_it_cannot_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each board has memory for 0.7 of the weights."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 5))
    room = int(0.7 * sum(4 * p.numel() for p in model.parameters()))
    small = replace(board("vcu118"), memory_nbytes=room)
    monkeypatch.setattr("hetpipe.profile.boards.board", lambda name: small)
    x, y = torch.randn(12, 64), torch.randint(0, 5, (12,))
    given: dict[str, Any] = {"cluster": boards(), "microbatches": 4, "schedule": "1f1b"}
    with pytest.raises(PlanError, match="bytes are missing"):
        hp.Pipeline(model, F.cross_entropy, (x, y), optimizer=hp.optim.adamw(), **given)
    with hp.Pipeline(model, F.cross_entropy, (x, y), **given) as pipe:
        assert pipe.plan.label == "modelled"
        assert max(stage.memory_nbytes for stage in pipe.plan.stages) <= room
        torch.testing.assert_close(pipe.predict(x), model(x).detach())


def test_no_program_trains() -> None:
    captured = CapturedForwards(seeded(MLP), F.cross_entropy, DATA[0], samples=6)
    stages = captured.stage_graphs([3], [{}, {}], [6], hp.optim.adamw())
    for stage in stages:
        assert list(stage.programs) == ["forward of 6 samples"]
        assert all(slot.role != "saved" for slot in stage.passes[6].forward.outputs)


def test_a_model_predicts_where_it_cannot_train(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device has memory for 0.7 of the weights, and a training needs their fourfold."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)], nn.Linear(64, 5))
    room = int(0.7 * sum(4 * p.numel() for p in model.parameters()))

    def with_little_memory(*args: Any, **how: Any) -> Any:
        found = profile(*args, **how)
        return {
            size: replace(
                table,
                devices={
                    id: replace(cost, memory_nbytes=room, memory_domain=id)
                    for id, cost in table.devices.items()
                },
            )
            for size, table in found.items()
        }

    monkeypatch.setattr("hetpipe.pipeline.planning.profile", with_little_memory)
    crew = crews(("numpy:cpu:0",) * 2)
    x, y = torch.randn(12, 64), torch.randint(0, 5, (12,))
    given: dict[str, Any] = {"cluster": crew.cluster, "crew": crew, "microbatches": 4}
    given["schedule"] = "1f1b"
    adamw = hp.optim.adamw()
    with pytest.raises(PlanError, match="bytes are missing"):
        hp.Pipeline(model, F.cross_entropy, (x, y), optimizer=adamw, **given)
    with hp.Pipeline(model, F.cross_entropy, (x, y), **given) as pipe:
        assert len(pipe.plan.stages) == 2
        assert max(stage.memory_nbytes for stage in pipe.plan.stages) <= room
        torch.testing.assert_close(pipe.predict(x), model(x).detach())
