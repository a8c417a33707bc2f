"""A recurrent language model trains as in unpartitioned torch, on every backend and across cuts."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from plans import unpriced
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member

STEPS = 20
TOKENS, LENGTH, MINI_BATCH, MICROBATCHES = 5, 9, 12, 3
LEARNING_RATE = 2.0
TOLERANCE = 1e-4
BACKENDS = ("pytorch", "numpy", "opencl")


class Language(nn.Module):
    """(n, length) of tokens -> (n, length, tokens) of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 6)
        self.lstm = nn.LSTM(6, 10, num_layers=2, batch_first=True)
        self.head = nn.Linear(10, TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(x))[0])


def loss_fn(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def fresh() -> Language:
    torch.manual_seed(1)
    return Language()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is asked for is the token before, and the last one in the first place."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, TOKENS, (STEPS, MINI_BATCH, LENGTH), generator=generator)
    return [(x, x.roll(1, 1)) for x in tokens]


@cache
def capture() -> Captured:
    """Captured once for all rows."""
    return Captured(fresh(), loss_fn, batches()[0])


@cache
def eager() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the gradients of the first step in plain torch."""
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    return train(model, loss_fn, batches(), MICROBATCHES, optimizer)


def device_of(backend: str) -> str:
    """The first device of a backend, none of OpenCL's emulators or interpreters."""
    for info in hp.discover_devices([backend])[0]:
        can = info.capabilities
        if backend != "opencl" or not (can.emulated or can.reference):
            return info.id
    pytest.skip(f"no device of {backend}")


@pytest.mark.parametrize(
    "backends",
    [
        *[(backend,) for backend in BACKENDS],
        ("opencl", "pytorch"),
        ("pytorch", "opencl", "numpy"),
        ("opencl", "opencl", "opencl"),
    ],
    ids="-".join,
)
def test_training_equals_unpartitioned(backends: tuple[str, ...]) -> None:
    members = tuple(Member(f"{'abc'[i]}", device_of(b)) for i, b in enumerate(backends))
    losses, gradients = eager()
    captured = capture()
    names = [member.id for member in members]
    plan, costs = unpriced(captured, names, "1f1b", MINI_BATCH, MICROBATCHES)
    with hp.Pipeline(
        fresh(),
        loss_fn,
        batches()[0],
        cluster=Cluster(members=members, transport="local"),
        optimizer=hp.optim.sgd(lr=LEARNING_RATE, momentum=0.9),
        captured=captured,
        plan=plan,
        costs=costs,
    ) as pipe:
        _, found = pipe.gradients(*batches()[0])
        assert found.keys() == gradients.keys()
        for key, gradient in gradients.items():
            error = (found[key] - gradient).norm().item()
            assert error <= TOLERANCE * gradient.norm().item() + 1e-6, (key, error)
        assert [pipe.step(x, y) for x, y in batches()] == pytest.approx(losses, rel=TOLERANCE)
    assert losses[-1] < 0.9 * losses[0]
