"""A gradient that is not finite although the loss is: a flush names it and applies nothing.

A stream is marked as damaged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, NotFiniteError

DEVICES = ("numpy:cpu:0", "pytorch:cpu:0")
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(7))
Y = torch.tensor([0, 1, 0, 1, 2, 1, 2, 2])
BAD = X.clone()
BAD[3] = 0.0


class Root(nn.Module):
    """The square root of zero is zero, and its gradient is not a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).abs().sqrt())


def open_pipeline(crew: Crew, **options: Any) -> hp.Pipeline:
    torch.manual_seed(2)
    options = {
        "cuts": [1], "microbatches": 2, "schedule": "1f1b", "optimizer": hp.optim.adam(lr=1e-3),
        **options,
    }  # fmt: skip
    return user_pipeline(crew, Root(), F.cross_entropy, (X, Y), **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"clip_norm": 1.0}, {"clip_norm": 1.0, "clip_each": True}, {"microbatches": 1}],
    ids=["plain", "clipped", "clipped each", "late"],
)
def test_nothing_is_applied_and_the_gradient_is_named(crews: Any, options: dict[str, Any]) -> None:
    with open_pipeline(crews(DEVICES), **options) as pipe:
        expected = [pipe.step(X, Y) for _ in range(2)]
        state = pipe.state_dict()
    with open_pipeline(crews(DEVICES), **options) as pipe:
        losses = [pipe.step(X, Y)]
        with pytest.raises(NotFiniteError, match=r"first.weight in stage 0 is not .* was applied"):
            pipe.step(BAD, Y)
        assert [*losses, pipe.step(X, Y)] == expected
        assert all(value.equal(state[name]) for name, value in pipe.state_dict().items())


def test_the_whole_accumulation_is_dropped(crews: Any) -> None:
    with open_pipeline(crews(DEVICES), accumulate=2) as pipe:
        before = pipe.state_dict()
        pipe.step(X, Y)
        with pytest.raises(NotFiniteError, match=r"first.weight in stage 0 is not .* was applied"):
            pipe.step(BAD, Y)
        assert all(value.equal(before[name]) for name, value in pipe.state_dict().items())


def test_a_stream_refuses_to_save_afterwards(crews: Any, tmp_path: Path) -> None:
    with open_pipeline(crews(DEVICES), schedule="pipedream") as pipe:
        pipe.step(X, Y)
        with pytest.raises(NotFiniteError, match=r"first.weight in stage 0 is not finite"):
            pipe.step(BAD, Y)
        with pytest.raises(CheckpointError, match=r"first\.weight in stage 0"):
            pipe.save(tmp_path)
