"""A refused batch leaves a pipeline unchanged."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from crews import UNLIKE
from models import MLP, batches
from pipelines import pipeline

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

DEVICES = UNLIKE[:2]


def _train(crew: Crew, schedule: str, refused: bool) -> dict[str, torch.Tensor]:
    """Train four mini-batches; if `refused`, offer an invalid one, with class 9, after two."""
    torch.manual_seed(0)
    model, data = MLP(), batches(4)
    pipe = pipeline(
        crew, model, F.cross_entropy, data[0], "01", schedule, 2, optimizer=hp.optim.adam(lr=0.01)
    )
    steps = [result.index for result in pipe.run(data[:2])]
    if refused:
        x, y = data[2]
        wrong = y.clone()
        wrong[7] = 9
        with pytest.raises(HetpipeError, match=r"y\[7\] is 9, but cross_entropy has 5 classes"):
            list(pipe.run([(x, wrong)]))
        if schedule == "1f1b":  # with the other schedule, an evaluation would flush
            with pytest.raises(HetpipeError, match=r"y\[7\] is 9"):
                pipe.evaluate([(x, wrong)])
    steps += [result.index for result in pipe.run(data[2:])]
    assert steps == [0, 1, 2, 3]
    return pipe.state_dict()


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_training_continues(crew: Crew, schedule: str) -> None:
    """Without a check, numpy would read a wrong class, or a device's error would end the run."""
    expected = _train(crew, schedule, refused=False)
    for name, value in _train(crew, schedule, refused=True).items():
        assert torch.equal(value, expected[name]), name
