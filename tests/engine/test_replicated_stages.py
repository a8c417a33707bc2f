"""Pipelines whose stages have different replica counts and shares equal unpartitioned training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crews import UNLIKE, Crews
from models import CASES
from pipelines import members_by_stage, pipeline
from reference import check_close, train
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

Shares = tuple[float, ...]
DEVICES = UNLIKE
ADAMW = hp.optim.adamw(lr=1e-2)


def open_divided(
    crew: Crew, model: Any, loss_fn: Any, example: Any, shares: Sequence[Shares],
    microbatches: int = 2, schedule: str = "1f1b", **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline with one stage per entry of `shares`, on one member per share."""
    return pipeline(
        crew, model, loss_fn, example, members_by_stage(crew, [len(each) for each in shares]),
        schedule, microbatches, shares=shares, optimizer=ADAMW, **options,
    )  # fmt: skip


def data(case: str, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [CASES[case].batch(generator) for _ in range(count)]


def compare(
    crew: Crew, case: str, shares: Sequence[Shares], microbatches: int = 2, **options: Any
) -> None:
    torch.manual_seed(0)
    model, loss_fn, batches = CASES[case].model(), CASES[case].loss_fn, data(case, 3)
    expected = train(model, loss_fn, batches, microbatches, lambda p: torch.optim.AdamW(p, lr=1e-2))
    with open_divided(crew, model, loss_fn, batches[0], shares, microbatches, **options) as pipe:
        assert [pipe.step(x, y) for x, y in batches] == pytest.approx(expected.losses, rel=1e-5)
        state = pipe.state_dict()
    check_close(state, expected.state)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("case", "shares"),
    [
        ("mlp", ((1, 1), (1,))),
        ("mlp", ((1,), (1, 1))),
        ("mlp", ((1, 1), (1, 1))),  # equal shares, so no rows move between replicas
        ("two_branch", ((2, 1), (1, 2))),
        ("two_branch", ((1,), (3, 2, 1), (1, 1))),
        ("two_branch", ((1, 2, 1), (1, 1))),  # the middle replica sends rows to both
    ],
    ids=str,
)
def test_equals_unpartitioned_training(crew: Crew, case: str, shares: Any) -> None:
    compare(crew, case, shares)


@pytest.mark.slow
@pytest.mark.parametrize("shares", [((1, 1), (1,)), ((1,), (2, 1)), ((1, 1), (2, 1))], ids=str)
def test_tied_weights(crew: Crew, shares: Any) -> None:
    compare(crew, "tied_autoencoder", shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"recompute": "inputs"}, {"schedule": "zb-h1"}, {"schedule": "fbp"}], ids=str
)
def test_recompute_halved_backwards_and_lanes(crew: Crew, options: dict[str, str]) -> None:
    compare(crew, "two_branch", ((2, 1), (1, 1)), **options)


def test_tied_weights_in_lanes(crew: Crew) -> None:
    compare(crew, "tied_autoencoder", ((1,), (1, 1)), schedule="fbp")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared-memory", "distributed"])
def test_every_transport(crews: Crews, transport: str) -> None:
    compare(crews(UNLIKE[:5], transport), "two_branch", ((1,), (2, 1), (1, 1)))


@pytest.mark.slow
def test_smaller_mini_batches_and_evaluation(crew: Crew) -> None:
    torch.manual_seed(0)
    model, batches = CASES["mlp"].model(), data("mlp", 2)
    shares = ((1, 1), (2, 1))
    with open_divided(crew, model, F.cross_entropy, batches[0], shares) as pipe:
        for x, y in [batches[0], (batches[1][0][:9], batches[1][1][:9])]:
            model.load_state_dict(pipe.state_dict())
            wanted = pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
            assert pipe.evaluate([(x, y)]).loss == wanted
            assert pipe.step(x, y) == wanted


class Merged(nn.Module):
    """A model whose cut tensor has several rows of one matrix for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.first(x.reshape(-1, 5))
        return self.second(rows).reshape(x.shape)


@pytest.mark.slow
def test_a_tensor_without_a_row_for_each_sample_is_refused(crew: Crew) -> None:
    x = torch.randn(12, 20)
    with pytest.raises(HetpipeError, match=r"not clear which dimension"):
        open_divided(crew, Merged(), F.mse_loss, (x, x), ((1, 1), (1,)))
    with open_divided(crew, Merged(), F.mse_loss, (x, x), ((1, 1), (1, 1))) as pipe:
        assert pipe.step(x, x) > 0
