"""Every synchronous schedule, run on workers, equals unpartitioned training."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from models import MLP
from plans import unpriced
from reference import train

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.cluster import Cluster, Member
from hetpipe.engine.crew import Crew

MICROBATCHES = 4


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(3))
    with Crew.start(Cluster(members, transport="local")) as started:
        yield started


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 20, generator=generator), torch.randint(0, 5, (12,), generator=generator))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("schedule", "members"),
    [
        *((name, "012") for name in ("naive", "gpipe", "1f1b", "1f1b-sno", "1f1b-so", "1f1b-as")),
        ("interleaved", "0101"),
        ("interleaved", "00"),
    ],
)
def test_equals_unpartitioned_training(crew: Crew, schedule: str, members: str) -> None:
    torch.manual_seed(0)
    model = MLP()
    data = batches(3)
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    losses, _ = train(eager, F.cross_entropy, data, MICROBATCHES, optimizer)
    captured = Captured(model, F.cross_entropy, data[0])
    plan, costs = unpriced(captured, [f"m{n}" for n in members], schedule, 12, MICROBATCHES)
    with hp.Pipeline(
        model, F.cross_entropy, data[0], cluster=crew.cluster, crew=crew, plan=plan, costs=costs,
        captured=captured, optimizer=hp.optim.adamw(lr=1e-2),
    ) as pipe:  # fmt: skip
        found = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
        assert len(pipe.timeline.workers) == len(set(members))
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-6)
