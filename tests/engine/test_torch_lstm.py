"""An LSTM layer on torch keeps its library's workspace from the forward to the backward.

The library decides the size of that tensor, whatever the graph declares.
"""

from __future__ import annotations

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


class Turned(nn.Module):
    """An LSTM whose inputs, results and incoming gradients are transposed views."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.lstm = nn.LSTM(12, 16, bidirectional=True)
        self.last, self.ends = nn.Linear(6, 5), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, states = self.lstm((x * self.scale).transpose(0, 1))
        ends = self.ends(torch.cat(states).permute(1, 2, 0)).tanh().sum(1)
        return self.last(y.permute(1, 2, 0)).tanh().sum(1) + ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "members"), [(Recurrent, "0"), (Recurrent, "01"), (Turned, "0")]
)  # fmt: skip
def test_an_lstm_trains_as_in_torch(crew: Crew, make: type[nn.Module], members: str) -> None:
    torch.manual_seed(0)
    model = make()
    data = [(torch.randn(8, 6, 12), torch.randint(0, 5, (8,))) for _ in range(3)]
    expected = train(model, F.cross_entropy, data, 2, lambda p: torch.optim.SGD(p, lr=0.1))
    with pipeline(
        crew, model, F.cross_entropy, data[0], members, microbatches=2,
        optimizer=hp.optim.sgd(lr=0.1),
    ) as pipe:  # fmt: skip
        assert [pipe.step(x, y) for x, y in data] == pytest.approx(expected.losses, rel=1e-5)
