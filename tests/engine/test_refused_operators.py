"""A device that lacks an operator is named before any loading, and the crew stays usable."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_backends import EarlyBackend
from pipelines import user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.host import registry

BATCH = torch.linspace(-1, 1, 24).reshape(6, 4), torch.arange(6) % 4


class Sine(nn.Linear):
    """A linear layer followed by a sine, in every mode or only in eval mode."""

    def __init__(self, trains: bool) -> None:
        super().__init__(4, 4)
        self.trains = trains

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x.sin() if self.trains or not self.training else x


@pytest.fixture(scope="module", params=["local", "shared-memory"])
def started(request: pytest.FixtureRequest) -> Iterator[Crew]:
    registry.register_backend(EarlyBackend)
    members = Member("whole", "numpy:cpu:0"), Member("partial", "early:cpu:0")
    with Crew.start(Cluster(members, transport=request.param)) as crew:
        yield crew


def open_pipeline(crew: Crew, *layers: nn.Module, **options: Any) -> hp.Pipeline:
    options = {"cuts": [1], "microbatches": 2, "schedule": "1f1b", **options}
    return user_pipeline(crew, nn.Sequential(*layers), F.cross_entropy, BATCH, **options)


@pytest.mark.slow
def test_cuts_a_device_cannot_run_are_refused(started: Crew) -> None:
    with open_pipeline(started, nn.Linear(4, 4), nn.Linear(4, 4)) as first:
        first.step(*BATCH)
        text = r"stage 1 on partial: early:cpu:0 cannot run aten.sin.* of layer 1: no sines here"
        with pytest.raises(UnsupportedOperatorError, match=text):
            open_pipeline(started, nn.Linear(4, 4), Sine(trains=True))
        first.step(*BATCH)  # no stage was loaded
    with open_pipeline(started, Sine(trains=True), nn.Linear(4, 4)) as second:
        second.step(*BATCH)


@pytest.mark.slow
def test_an_evaluation_a_device_cannot_run_is_refused(started: Crew) -> None:
    """The stages for evaluation would replace the stages in training."""
    losses: list[list[float]] = []
    for evaluates in (False, True):
        torch.manual_seed(0)
        with open_pipeline(started, nn.Linear(4, 4), Sine(trains=False)) as pipe:
            losses.append([])
            for _ in range(3):
                losses[-1].append(pipe.step(*BATCH))
                if evaluates:
                    with pytest.raises(UnsupportedOperatorError, match="no sines here"):
                        pipe.evaluate([BATCH])
    assert losses[0] == losses[1]
