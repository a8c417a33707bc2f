"""A float64 model trains in float64: its learning rate, loss, scale and norm are float64 too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import Parameters, check_close, train
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
Y = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
LR = 0.1  # not exact in float32
RULES: dict[str, tuple[hp.optim.Optimizer, Callable[[Parameters], torch.optim.Optimizer]]] = {
    "sgd": (hp.optim.sgd(LR, 0.9), lambda p: torch.optim.SGD(p, LR, 0.9)),
    "adam": (hp.optim.adam(LR), lambda p: torch.optim.Adam(p, LR)),
    "adamw": (hp.optim.adamw(LR), lambda p: torch.optim.AdamW(p, LR)),
    "rmsprop": (
        hp.optim.rmsprop(LR, momentum=0.3), lambda p: torch.optim.RMSprop(p, LR, momentum=0.3)
    ),
    "adagrad": (hp.optim.adagrad(LR), lambda p: torch.optim.Adagrad(p, LR)),
}  # fmt: skip


def sum_and_count(o: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return F.cross_entropy(o, y, reduction="sum"), (y != -100).sum()


def opencl_ids() -> list[str]:
    """Return the OpenCL devices on processors; the others are slow interpreters."""
    infos = hp.discover_devices(["opencl"])[0]
    return [info.id for info in infos if info.kind == "cpu" and not info.capabilities.emulated]


@pytest.mark.slow
@pytest.mark.parametrize("device_id", opencl_ids())
def test_opencl_refuses_products_in_float64(crews: Any, device_id: str) -> None:
    """OpenCL's matrix kernels are float32, and a device never computes less exactly than asked."""
    crew: Crew = crews((device_id, "pytorch:cpu:0"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    with pytest.raises(HetpipeError, match=f"stage 0 .*{device_id} cannot run .*float64"):
        hp.Pipeline(
            model, F.cross_entropy, (X, Y), cluster=crew.cluster, crew=crew, cuts=[1],
            microbatches=3, schedule="1f1b", optimizer=hp.optim.sgd(LR),
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_steps_equal_torch_in_float64(crews: Any, name: str) -> None:
    crew: Crew = crews(DEVICES)
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    rule, optimizer = RULES[name]
    expected = train(
        model, F.cross_entropy, [(X, Y)] * 4, 1, optimizer,
        before_step=lambda p: torch.nn.utils.clip_grad_norm_(p, 0.1),
    )  # fmt: skip
    with hp.Pipeline(
        model, sum_and_count if name == "adam" else F.cross_entropy, (X, Y), cluster=crew.cluster,
        crew=crew, cuts=[1], microbatches=3, schedule="1f1b", optimizer=rule, clip_norm=0.1,
    ) as pipe:  # fmt: skip
        for loss in expected.losses:
            assert pipe.step(X, Y) == pytest.approx(loss, rel=1e-12)
        evaluated, state = pipe.evaluate([(X, Y)]).loss, pipe.state_dict()
    check_close(state, expected.state, rtol=1e-11, atol=1e-13)
    model.load_state_dict(expected.state)
    assert evaluated == pytest.approx(F.cross_entropy(model(X), Y).item(), rel=1e-12)
