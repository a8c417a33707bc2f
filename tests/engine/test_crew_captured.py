"""Captured models on a crew equal eager training, also with uneven micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from captures import shared
from crews import MIXED, UNLIKE, Crews
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.program import BUFFER, PARAM
from hetpipe.crew.request import StepRequest
from hetpipe.schedule.generators import generate
from hetpipe.sdk.host.registry import get_backend

SIZES = (3, 3, 2)
LR = 0.05
SGD = hp.optim.sgd(lr=LR, momentum=0.9)


class Net(nn.Module):
    """A model whose batch norm changes buffers, and whose `first` is tied to `last`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.relu(self.middle(h)) + h)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    return torch.randn(sum(SIZES), 6), torch.randint(0, 6, (sum(SIZES),))


def make() -> nn.Module:
    torch.manual_seed(1)
    return Net().train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "schedule", "members"),
    [
        ("local", "gpipe", ("m1", "m3", "m5")),  # pytorch
        ("shared-memory", "1f1b", ("m0", "m1", "m2")),  # pytorch, numpy, pytorch
        ("distributed", "1f1b", ("m1", "m0", "m2")),  # numpy, pytorch, pytorch
    ],
)
def test_equals_eager(
    crews: Crews, transport: str, schedule: str, members: tuple[str, ...]
) -> None:
    crew = crews(UNLIKE if transport == "local" else MIXED, transport)
    captured = shared(make(), nn.functional.cross_entropy, data())
    count = len(captured.layer_graph(3).layers)
    cuts = [count // 3, 2 * count // 3]
    tables = [get_backend(crew.infos[name].backend).decompositions() for name in members]
    stages = captured.stage_graphs(cuts, tables, sorted(set(SIZES)), SGD)
    tied = [
        (owner, others) for _, owner, others in dict.fromkeys(t for s in stages for t in s.tied)
    ]
    assert tied, "the cuts must part the tied layers"
    expected = train(
        make(), nn.functional.cross_entropy, [data()] * 3, len(SIZES),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9),
    )  # fmt: skip
    crew.load(stages, members, {**captured.parameters, **captured.buffers})
    actions = generate(schedule, 3, len(SIZES), tied=tied)
    for number, loss in enumerate(expected.losses, 1):
        result = crew.step(request(captured, actions, number))
        pairs = zip(result.losses, SIZES, strict=True)
        assert sum(a * n for a, n in pairs) / sum(SIZES) == pytest.approx(loss, abs=1e-5)
    found: dict[str, Any] = {**crew.read(PARAM), **crew.read(BUFFER)}
    for name, value in found.items():
        right = expected.state[name].numpy()
        np.testing.assert_allclose(value, right, rtol=1e-4, atol=1e-5, err_msg=name)
    assert "first.weight" in found
    assert "norm.running_var" in found


def request(captured: Captured, actions: Any, number: int) -> StepRequest:
    leaves = captured.leaves(*data())
    ends = np.cumsum(SIZES)[:-1]
    parts = {name: np.split(np.asarray(leaf), ends) for name, leaf in leaves.items()}
    feeds = [{name: part[m] for name, part in parts.items()} for m in range(len(SIZES))]
    tangents = tuple(size / sum(SIZES) for size in SIZES)
    return StepRequest(actions, SIZES, feeds, tangents, {"lr": LR}, number, grad_scale=1.0)
