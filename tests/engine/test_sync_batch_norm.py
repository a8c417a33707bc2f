"""Batch norm over the rows of all replicas equals training without replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from captures import shared
from crews import ALIKE, UNLIKE, Crews
from models import CASES
from pipelines import members_by_stage, pipeline
from reference import train
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError

Shares = Sequence[tuple[float, ...]]
DEVICES = UNLIKE[:4]
SGD = hp.optim.sgd(lr=0.1, momentum=0.9)


class Normalized(nn.Module):
    """A norm of rows far from 0, and a norm without weights and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.plain = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
        self.last = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.silu(self.norm(self.first(x) + 30.0))
        return self.last(torch.tanh(self.plain(self.second(x)) + x))


def batches(count: int, rows: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 20, generator=generator) * (1 + n), torch.arange(rows) % 5)
        for n in range(count)
    ]


def open_synced(
    crew: Crew, model: nn.Module, example: Any, shares: Shares, microbatches: int = 2,
    schedule: str = "1f1b", sync: bool = True, **options: Any,
) -> hp.Pipeline:  # fmt: skip
    """Open a pipeline with one stage per entry of `shares`, on one member per share."""
    return pipeline(
        crew, model, F.cross_entropy, example,
        members_by_stage(crew, [len(each) for each in shares]), schedule, microbatches,
        shares=shares, optimizer=SGD, sync_batch_norm=sync, **options,
    )  # fmt: skip


def distance(
    crew: Crew, model: nn.Module, data: Sequence[Any], shares: Shares, microbatches: int = 2,
    **options: Any,
) -> float:  # fmt: skip
    """Return the largest relative error against training without replicas.

    It covers losses, parameters and statistics, each relative to its largest element.
    """
    expected = train(
        model, F.cross_entropy, data, microbatches, lambda p: torch.optim.SGD(p, 0.1, 0.9)
    )
    with open_synced(crew, model, data[0], shares, microbatches, **options) as pipe:
        found = [pipe.step(x, y) for x, y in data]
        state = pipe.state_dict()
    pairs = [(torch.tensor(found), torch.tensor(expected.losses))]
    pairs += [(state[name], value) for name, value in expected.state.items()]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs)


CLOSE = 1e-5
HALVES = slice(0, 8), slice(8, 16)
"""The micro-batches of a mini-batch."""


@pytest.mark.wide
@pytest.mark.parametrize(
    "shares",
    [((1,),), ((1, 1),), ((4, 2, 2),), ((1,), (2, 1)), ((2, 1), (1,)), ((1, 1), (2, 1))],
    ids=str,
)
def test_equals_training_without_replicas(crew: Crew, shares: Shares) -> None:
    torch.manual_seed(0)
    assert distance(crew, Normalized(), batches(3), shares) < CLOSE


@pytest.mark.slow
def test_local_statistics_differ_from_training_without_replicas(crew: Crew) -> None:
    torch.manual_seed(0)
    assert distance(crew, Normalized(), batches(3), ((2, 1),), sync=False) > 100 * CLOSE


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"recompute": "inputs"}, {"recompute": "min-cut"}, {"schedule": "zb-h1"}],
    ids=str,
)
def test_with_recompute_and_halves(crew: Crew, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert distance(crew, Normalized(), batches(3), ((2, 1), (1, 1)), **options) < CLOSE


@pytest.mark.slow
def test_a_convolutional_network_over_shared_memory(crews: Crews) -> None:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    case = CASES["residual_cnn"]
    model, data = case.model(), [case.batch(generator) for _ in range(2)]
    crew = crews(DEVICES, "shared-memory")
    assert distance(crew, model, data, ((2, 1), (1, 1))) < CLOSE


@pytest.mark.slow
def test_between_hosts(crews: Crews) -> None:
    torch.manual_seed(0)
    crew = crews(ALIKE, "distributed")
    assert distance(crew, Normalized(), batches(2), ((2, 1), (1,))) < CLOSE


@pytest.mark.slow
def test_opencl_beside_others(crews: Crews) -> None:
    found, _ = hp.discover_devices(["opencl"])
    if not found:
        pytest.skip("no OpenCL device: install the extra `opencl`")
    torch.manual_seed(0)
    crew = crews((found[0].id, "numpy:cpu:0", "pytorch:cpu:0"))
    assert distance(crew, Normalized(), batches(2), ((2, 1), (1,))) < CLOSE


@pytest.mark.slow
def test_a_frozen_stage_has_statistics_too(crew: Crew) -> None:
    """The replicas of a frozen stage have no gradients to sum but do exchange statistics."""
    torch.manual_seed(0)
    model = Normalized()
    for parameter in (*model.first.parameters(), *model.norm.parameters()):
        parameter.requires_grad_(False)
    assert distance(crew, model, batches(2), ((2, 1), (1,))) < CLOSE


@pytest.mark.slow
def test_other_sizes_evaluation_and_a_checkpoint(crew: Crew, tmp_path: Any) -> None:
    """In evaluation, the norm without running statistics also needs the statistics of all rows."""
    torch.manual_seed(0)
    model, eager, shares = Normalized(), Normalized(), ((2, 1),)
    first, (x, y) = batches(2)
    with open_synced(crew, model, first, shares) as pipe:
        pipe.step(*first)
        assert pipe.step(x[:11], y[:11]) > 0
        eager.load_state_dict(pipe.state_dict())
        eager.eval()
        halves = [F.cross_entropy(eager(x[half]), y[half]).item() for half in HALVES]
        assert pipe.evaluate([(x, y)]).loss == pytest.approx(sum(halves) / 2, rel=1e-5)
        pipe.save(tmp_path)
        wanted = pipe.step(x, y)
    with open_synced(crew, Normalized(), first, shares, checkpoint=tmp_path) as pipe:
        assert pipe.step(x, y) == wanted


@pytest.mark.slow
def test_invalid_options_are_refused(crew: Crew) -> None:
    example = batches(1)[0]
    with pytest.raises(HetpipeError, match=r"replicas of stage 0 take mini-batches in turn.*1f1b"):
        open_synced(crew, Normalized(), example, ((1, 1), (1,)), 1, "pipedream")
    with pytest.raises(HetpipeError, match=r"fbp runs two passes of stage 1 at once.*1f1b"):
        open_synced(crew, Normalized(), example, ((1,), (1, 1)), schedule="fbp")
    captured = shared(Normalized(), F.cross_entropy, example)
    with pytest.raises(HetpipeError, match="captured has sync_batch_norm=False"):
        hp.Pipeline(
            Normalized(), F.cross_entropy, example, cluster=crew.cluster, crew=crew,
            captured=captured, optimizer=hp.optim.sgd(lr=0.1), sync_batch_norm=True,
        )  # fmt: skip
    with pytest.raises(HetpipeError, match=r"needs? 2 samples or more.*fewer replicas"):
        open_synced(crew, Normalized(), example, ((1, 1, 1),), microbatches=4)


class Sized(nn.Module):
    """A model whose structure depends on the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm1d(20), nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return self.last(self.norm(x) if len(x) > 4 else x)


@pytest.mark.slow
def test_replicas_that_would_deadlock_are_refused(crew: Crew) -> None:
    with pytest.raises(HetpipeError, match=r"replicas of stage 0 would sum float32\[21\] then"):
        open_synced(crew, Sized(), batches(1)[0], ((2, 1),), microbatches=2)
