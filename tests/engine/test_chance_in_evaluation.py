"""A model that also draws random numbers in eval mode is evaluated as it was trained."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.crew.crew import Crew

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(8))


class Sampled(nn.Module):
    """A model that adds noise to its features in every mode."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.first, self.last, self.noise = nn.Linear(6, 5), nn.Linear(5, 3), noise

    def forward(self, x: Tensor) -> Tensor:
        mean = self.first(x)
        normal = torch.distributions.Normal(mean, F.softplus(mean) + 0.1)
        drawn = torch.randn_like(mean) * self.noise
        return self.last(mean + drawn - 0.1 * normal.log_prob(mean.detach()))


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_evaluation_draws(crew: Crew, noise: float) -> None:
    torch.manual_seed(2)
    model = Sampled(noise)
    theirs = copy.deepcopy(model)
    with hp.Pipeline(
        model, F.mse_loss, (X, Y), cluster=crew.cluster, crew=crew, cuts=[1], microbatches=4,
        schedule="gpipe", optimizer=hp.optim.sgd(0.1),
    ) as pipe:  # fmt: skip
        pipe.step(X, Y)
        theirs.load_state_dict(pipe.state_dict())
        quiet, drawn = copy.deepcopy(theirs), pipe.evaluate([(X, Y)]).loss
        quiet.noise = 0.0
        expected = F.mse_loss(quiet(X), Y).item()
        if noise:
            assert abs(drawn - expected) > 1e-3
        else:
            assert drawn == pytest.approx(expected, rel=1e-5)
