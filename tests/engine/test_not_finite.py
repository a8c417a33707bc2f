"""A loss that is not finite ends training; with check_finite the error names the place."""

from __future__ import annotations

import pytest
import torch
from models import batches
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError


class Root(nn.Module):
    """A model whose second of three stages takes the square root of values that may be negative."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(20, 8), nn.Linear(8, 5)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)).sqrt())


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_training_ends(crew: Crew, schedule: str) -> None:
    with pytest.raises(HetpipeError, match=r"loss of mini-batch 0 is nan \(first in micro"):
        train(crew, schedule, check_finite=False)


def test_the_stage_and_tensor_are_named(crew: Crew) -> None:
    named = r"at 1F0: cut '\w+' of stage 1 is the first tensor that is not finite"
    with pytest.raises(HetpipeError, match=named):
        train(crew, "1f1b", check_finite=True)


def train(crew: Crew, schedule: str, check_finite: bool) -> None:
    torch.manual_seed(0)
    model, data = Root(), batches(2)
    with pipeline(
        crew, model, nn.functional.cross_entropy, data[0], "012", schedule, 2,
        optimizer=hp.optim.sgd(lr=0.1), check_finite=check_finite,
    ) as pipe:  # fmt: skip
        list(pipe.run(data))
