"""Losses as sums with counts equal torch's means, whole and in a pipeline's micro-batches."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import user_pipeline
from torch import Tensor, nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

CLASSES = 5
DRAWN = torch.Generator().manual_seed(3)
WEIGHT = torch.rand(CLASSES, generator=DRAWN, dtype=torch.float64) + 0.1


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAWN, dtype=torch.float64)


def labels(*shape: int) -> Tensor:
    """Return classes; the first two rows, and every third label, are ignored."""
    drawn = torch.randint(0, CLASSES, shape, generator=DRAWN)
    drawn[:2] = -100
    drawn.view(-1)[::3] = -100
    return drawn


LOGITS, Y = randn(9, CLASSES), labels(9)
PROBABILITIES = randn(9, CLASSES).softmax(1)
TOKENS, TEXT = randn(9, 4, CLASSES), labels(9, 4)
NUMBERS, TARGETS = randn(9, 3), randn(9, 3)
CASES: dict[str, tuple[Any, Callable[..., Tensor], Tensor, Tensor]] = {
    "plain": (hp.losses.cross_entropy(), F.cross_entropy, LOGITS, Y),
    "weighted": (
        hp.losses.cross_entropy(WEIGHT, label_smoothing=0.1),
        lambda o, y: F.cross_entropy(o, y, WEIGHT, label_smoothing=0.1), LOGITS, Y,
    ),
    "another ignored label": (
        hp.losses.cross_entropy(ignore_index=2),
        lambda o, y: F.cross_entropy(o, y, ignore_index=2), LOGITS, Y.clamp(min=0),
    ),
    "probabilities": (hp.losses.cross_entropy(), F.cross_entropy, LOGITS, PROBABILITIES),
    "tokens": (
        hp.losses.cross_entropy(dim=-1),
        lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), TOKENS, TEXT,
    ),
    "nll": (
        hp.losses.nll(WEIGHT), lambda o, y: F.nll_loss(o, y, WEIGHT), LOGITS.log_softmax(1), Y,
    ),
    "mse": (hp.losses.mse(), F.mse_loss, NUMBERS, TARGETS),
    "l1": (hp.losses.l1(), F.l1_loss, NUMBERS, TARGETS),
    "bce": (
        hp.losses.bce_with_logits(pos_weight=WEIGHT[:3]),
        lambda o, y: F.binary_cross_entropy_with_logits(o, y, pos_weight=WEIGHT[:3]),
        NUMBERS, (TARGETS > 0).double(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("parts", [[9], [4, 5], [2, 3, 4]], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_over_counts_equal_torchs_mean(case: str, parts: list[int]) -> None:
    loss, expected, output, y = CASES[case]
    results = map(loss, output.split(parts), y.split(parts))
    total, count = (sum(each) for each in zip(*results, strict=True))
    torch.testing.assert_close(total / count, expected(output, y), rtol=1e-12, atol=0)


@pytest.mark.parametrize("case", ["weighted", "tokens", "mse"])
def test_a_pipeline_trains_as_torch_does(crew: Crew, case: str) -> None:
    """The first of the two micro-batches of classes has fewer labels."""
    loss, expected, output, y = CASES[case]
    x = randn(9, *output.shape[1:-1], 6)

    def network() -> nn.Module:
        torch.manual_seed(2)
        layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, output.shape[-1])
        return nn.Sequential(*layers).double()

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = user_pipeline(
        crew, network(), loss, (x, y), cuts=[1], microbatches=2, schedule="1f1b",
        optimizer=hp.optim.sgd(lr=0.1),
    )  # fmt: skip
    with found as pipe:
        for _ in range(5):
            optimizer.zero_grad()
            mean = expected(model(x), y)
            mean.backward()
            optimizer.step()
            assert pipe.step(x, y) == pytest.approx(mean.item(), rel=1e-12)
        torch.testing.assert_close(
            pipe.state_dict(), dict(model.state_dict()), rtol=1e-11, atol=1e-12
        )


def test_shapes_that_torch_would_broadcast_are_refused() -> None:
    with pytest.raises(HetpipeError, match=r"the shape \[9, 1\] and y \[9\]"):
        hp.losses.mse()(NUMBERS[:, :1], TARGETS[:, 0])


def test_hetpipe_starts_without_torch() -> None:
    code = "import sys, json, hetpipe; print(json.dumps('torch' in sys.modules))"
    assert json.loads(subprocess.check_output([sys.executable, "-c", code])) is False
