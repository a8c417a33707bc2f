"""A task for tests of `Pipeline.fit`: data, a model with dropout, and a recording callback."""

from __future__ import annotations

from typing import Any

import torch
from captures import shared
from pipelines import user_pipeline
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hetpipe as hp
from hetpipe.callbacks import Callback
from hetpipe.crew.crew import Crew

SAMPLES, SIZE, CLASSES, INPUTS = 26, 4, 3, 5
"""Seven mini-batches; the last one has two samples."""


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64)
    return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)


def loader(seed: int | None = None, **options: Any) -> DataLoader[Any]:
    """Return a shuffling loader; without a seed it shuffles by torch's default generator."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    options = {"batch_size": SIZE, "shuffle": True, "generator": generator, **options}
    return DataLoader(TensorDataset(*data()), **options)


def model(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, CLASSES)
    ).double()


def accuracy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == y).double().mean()


def open_fit(crew: Crew, net: nn.Module | None = None, **options: Any) -> hp.Pipeline:
    """Open a pipeline of two stages."""
    x, y = data()
    net = net or model()
    loss_fn, example = nn.functional.cross_entropy, (x[:SIZE], y[:SIZE])
    options = {
        "cuts": [1], "microbatches": 2, "schedule": "1f1b",
        "captured": shared(net, loss_fn, example), **options,
    }  # fmt: skip
    return user_pipeline(crew, net, loss_fn, example, **options)


class Record(Callback):
    """Records every call. `at`: (epoch, batch) at which `act` is called."""

    def __init__(self, at: tuple[int, int] = (0, 0), act: Any = None) -> None:
        self.losses: list[float] = []
        self.calls: list[str] = []
        self.at, self.act = at, act
        self.error: BaseException | None = None

    def begin(self, state: Any) -> None:
        self.calls.append("begin")

    def step(self, state: Any, result: Any) -> None:
        self.losses.append(result.loss)
        if (state.epoch, state.batch) == self.at:
            self.act(state)

    def epoch(self, state: Any, row: Any) -> None:
        self.calls.append(f"epoch {row.epoch}")

    def end(self, state: Any) -> None:
        self.calls.append("end")
        self.error = state.error
