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
from models import MLP, Normalized, batches
from torch import nn

import hetpipe as hp
from hetpipe.capture.captured import CapturedForwards
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, PlanError
from hetpipe.profile.measure import profile

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
    with opened(crew, seeded(Normalized).eval(), microbatches=2, **plan) as pipe:
        for x, y in DATA:
            torch.testing.assert_close(pipe.predict(x), plain(x).detach())
            assert pipe.evaluate([(x, y)]).loss == pytest.approx(
                F.cross_entropy(plain(x), y).item(), rel=1e-6
            )
        if replicas is None:
            torch.testing.assert_close(pipe.predict(x[:5]), plain(x[:5]).detach())
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


def test_no_program_trains() -> None:
    captured = CapturedForwards(seeded(MLP), F.cross_entropy, DATA[0])
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
