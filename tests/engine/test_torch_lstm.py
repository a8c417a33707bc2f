"""An LSTM layer on torch keeps its library's workspace from the forward to the backward: a tensor
whose size is the library's affair, whatever the graph declares for it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from pipelines import pipeline
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew

DEVICES = ("pytorch:cpu:0", "pytorch:cpu:0")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(x)[0][:, -1])


@pytest.mark.parametrize("members", ["0", "01"])
def test_it_trains_as_torch_does(crew: Crew, members: str) -> None:
    torch.manual_seed(0)
    model = Recurrent()
    data = [(torch.randn(8, 6, 12), torch.randint(0, 5, (8,))) for _ in range(3)]
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    expected, _ = train(eager, F.cross_entropy, data, 2, optimizer)
    with pipeline(
        crew, model, F.cross_entropy, data[0], members, microbatches=2,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        assert [pipe.step(x, y) for x, y in data] == pytest.approx(expected, rel=1e-5)
