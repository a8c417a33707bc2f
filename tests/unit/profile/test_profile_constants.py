"""A profile keeps the shapes of constants."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetpipe.capture import capture
from hetpipe.profile.patterns import Network
from hetpipe.profile.profiler import Session, Times
from hetpipe.sdk.host.registry import get_backend, open_device


class Masked(nn.Module):
    """A model that fills a column with a number from a 0-d tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).clone()
        y[:, 1:2].fill_(torch.tensor(0.5))
        return y


@pytest.mark.parametrize("backend", ["pytorch", "numpy"])
def test_a_0d_constant_stays_0d(backend: str) -> None:
    """torch's fill refuses a vector of one element, which the profile once passed."""
    model = capture(Masked(), F.mse_loss, (torch.randn(2, 3), torch.randn(2, 4)))
    table = get_backend(backend).decompositions()
    stages = model.stage_graphs([], [table], [2], None)
    session, taken = Session(open_device(f"{backend}:cpu:0"), Network.of(stages)), Times()
    assert not session.refused
    session.walk(2, session.able, taken)
    assert taken.runs == 2
