"""Batch norm over the rows of all replicas: training equals that without replicas."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import CASES
from plans import unpriced
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.engine.crew import Crew
from hetpipe.errors import HetpipeError

Shares = Sequence[tuple[float, ...]]


class Normalized(nn.Module):
    """Norms in both halves, one without an affine part, rows far from 0, and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.first(x) + 30.0))
        return self.last(torch.tanh(self.plain(self.second(x)) + x))


def crew_of(transport: str) -> Crew:
    devices = ("numpy:cpu:0", "pytorch:cpu:0") * 2
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    return Crew.start(Cluster(members, transport=transport))


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with crew_of("local") as started:
        yield started


def batches(count: int, rows: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 20, generator=generator) * (1 + n), torch.arange(rows) % 5)
        for n in range(count)
    ]


def pipeline(
    crew: Crew, model: nn.Module, example: Any, shares: Shares, microbatches: int = 2,
    schedule: str = "1f1b", sync: bool = True, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    captured = Captured(model, F.cross_entropy, example, sync_batch_norm=sync)
    names = iter(crew.infos)
    members = [tuple(next(names) for _ in replicas) for replicas in shares]
    rows = len(example[0])
    plan, costs = unpriced(captured, members, schedule, rows, microbatches, shares=shares)
    return hp.Pipeline(
        model, F.cross_entropy, example, cluster=crew.cluster, crew=crew, plan=plan, costs=costs,
        captured=captured, optimizer=hp.optim.sgd(lr=0.1, momentum=0.9), sync_batch_norm=sync,
        **options,
    )  # fmt: skip


def distance(
    crew: Crew, model: nn.Module, data: Sequence[Any], shares: Shares, microbatches: int = 2,
    **options: Any,
) -> float:  # fmt: skip
    """How far from training without replicas: the worst of losses, parameters and statistics,
    relative to the largest element of each."""
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    wanted, _ = train(eager, F.cross_entropy, data, microbatches, optimizer)
    with pipeline(crew, model, data[0], shares, microbatches, **options) as pipe:
        found = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
    pairs = [(torch.tensor(found), torch.tensor(wanted))]
    pairs += [(state[name], value) for name, value in eager.state_dict().items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


ALIKE = 1e-5


@pytest.mark.parametrize(
    "shares", [((1, 1),), ((2, 1),), ((4, 2, 2),), ((1,), (2, 1)), ((2, 1), (1,)), ((1, 1), (2, 1))],
    ids=str,
)  # fmt: skip
def test_equals_training_without_replicas(crew: Crew, shares: Shares) -> None:
    torch.manual_seed(0)
    assert distance(crew, Normalized(), batches(3), shares) < ALIKE


def test_local_statistics_do_not(crew: Crew) -> None:
    torch.manual_seed(0)
    assert distance(crew, Normalized(), batches(3), ((2, 1),), sync=False) > 100 * ALIKE
