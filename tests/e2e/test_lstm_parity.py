"""Recurrent language models train as in unpartitioned torch, on every backend and across cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from parity import RUNTIMES, Run, check_equal, start_crew
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.zoo.lstm import Recurrent
from hetpipe.zoo.text import token_loss

pytestmark = pytest.mark.slow

STEPS = 20
TOKENS, WIDTH, LENGTH, MINI_BATCH, MICROBATCHES = 5, 10, 9, 12, 3
LEARNING_RATE = 2.0

ROWS = [
    ("pytorch",), ("numpy",), ("opencl",), ("opencl", "pytorch"),
    ("pytorch", "opencl", "numpy"), ("opencl", "opencl", "opencl"),
]  # fmt: skip
RUNTIME_ROWS = [(runtime,) * stages for runtime in RUNTIMES for stages in (1, 2, 3)]


class Language(nn.Module):
    """Two LSTM layers in one module: (n, length) tokens -> (n, length, tokens) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 6)
        self.lstm = nn.LSTM(6, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def language() -> nn.Module:
    torch.manual_seed(1)
    return Language()


def recurrent() -> nn.Module:
    """Return a model with two LSTM layers in separate modules."""
    torch.manual_seed(1)
    return Recurrent(TOKENS, WIDTH, layers=2)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return batches with the previous token as target, cyclically."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, TOKENS, (STEPS, MINI_BATCH, LENGTH), generator=generator)
    return [(x, x.roll(1, 1)) for x in tokens]


def run_of(model: Callable[[], nn.Module]) -> Run:
    return Run(
        model, token_loss, batches(), MICROBATCHES,
        hp.optim.sgd(lr=LEARNING_RATE, momentum=0.9),
        lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9),
    )  # fmt: skip


LANGUAGE, RECURRENT = run_of(language), run_of(recurrent)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with start_crew([*ROWS, *RUNTIME_ROWS]) as started:
        yield started


@pytest.mark.wide
@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_layers_of_one_module_equal_unpartitioned(crew: Crew, row: Sequence[str]) -> None:
    check_equal(crew, row, LANGUAGE)


@pytest.mark.wide
@pytest.mark.parametrize("row", RUNTIME_ROWS, ids="-".join)
def test_layers_in_separate_modules_equal_unpartitioned(crew: Crew, row: Sequence[str]) -> None:
    check_equal(crew, row, RECURRENT)
