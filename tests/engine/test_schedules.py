"""Every synchronous schedule on workers equals unpartitioned training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP, Normalized, batches
from pipelines import pipeline
from reference import check_close, train

import hetpipe as hp
from hetpipe.crew.crew import Crew

MICROBATCHES = 4
ADAMW = hp.optim.adamw(lr=1e-2)
SGD = hp.optim.sgd(lr=0.1, momentum=0.9)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("schedule", "members"),
    [
        *((name, "012") for name in ("naive", "gpipe", "1f1b", "1f1b-sno", "1f1b-so", "1f1b-as")),
        ("interleaved", "0101"),
        ("interleaved", "00"),
        ("zb-h1", "012"),
        ("zb-v", "0110"),
        ("fbp", "0"),
        ("fbp", "012"),
    ],
)
def test_equals_unpartitioned_training(crew: Crew, schedule: str, members: str) -> None:
    compare(crew, schedule, members)


@pytest.mark.parametrize("mode", ["inputs", "min-cut"])
@pytest.mark.parametrize(("schedule", "members"), [("1f1b", "012"), ("zb-h1", "01"), ("fbp", "01")])
def test_recompute_changes_nothing(crew: Crew, schedule: str, members: str, mode: str) -> None:
    compare(crew, schedule, members, recompute=mode)


def test_recompute_in_one_of_two_stages(crew: Crew) -> None:
    compare(crew, "gpipe", "01", recompute=["inputs", "none"])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream", "zb-h1", "fbp"])
def test_evaluation_equals_eval_mode(crew: Crew, schedule: str) -> None:
    torch.manual_seed(0)
    model, data = Normalized(), batches(3)
    with pipeline(crew, model, F.cross_entropy, data[0], "01", schedule, 2, optimizer=SGD) as pipe:
        for rows in (12, 12, 7):
            list(pipe.run(data))
            model.load_state_dict(pipe.state_dict())
            x, y = batches(5)[4]
            before = pipe.state_dict()
            found = pipe.evaluate([(x[:rows], y[:rows])]).loss
            model.eval()
            wanted = F.cross_entropy(model(x[:rows]), y[:rows]).item()
            assert found == pytest.approx(wanted, rel=1e-5)
            model.train()
            assert all(torch.equal(before[name], v) for name, v in pipe.state_dict().items())


def compare(crew: Crew, schedule: str, members: str, **options: Any) -> None:
    """Compare the losses and all weights of three steps with torch."""
    torch.manual_seed(0)
    model = MLP()
    data = batches(3)
    expected = train(
        model, F.cross_entropy, data, MICROBATCHES, lambda p: torch.optim.AdamW(p, lr=1e-2)
    )
    with pipeline(
        crew, model, F.cross_entropy, data[0], members, schedule, MICROBATCHES, optimizer=ADAMW,
        **options,
    ) as pipe:  # fmt: skip
        found = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        lanes = 2 if schedule == "fbp" else 1
        assert len(pipe.timeline.workers) == len(set(members)) * lanes
    assert found == pytest.approx(expected.losses, rel=1e-5)
    check_close(state, expected.state)
