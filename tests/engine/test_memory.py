"""The memory that stages hold in training, counted as the papers count it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MLP
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.crew.crew import Crew
from hetpipe.papers.footprint import (
    CutModel,
    Footprint,
    flushed,
    predicted_nbytes,
    streamed,
)
from hetpipe.papers.memory import encoder, tokens
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.worker.memory import nbytes_of
from hetpipe.worker.stage import Stage
from hetpipe.worker.weights import Stashed

DEVICE = "numpy:cpu:0"
STAGES, SAMPLES = 4, 3
LENGTH, VOCABULARY = 32, 64  # of the encoder


def vectors(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(samples, 20), torch.zeros(samples, dtype=torch.int64)


@functools.cache
def perceptron() -> CutModel:
    """A model of four layers, each a stage."""
    captured = Captured(MLP(), F.cross_entropy, vectors(SAMPLES))
    return CutModel(captured, hp.optim.adam(lr=1e-2), (1, 2, 3), DEVICE)


@functools.cache
def small_encoder() -> CutModel:
    sizes = {"blocks": 4, "width": 64, "heads": 2, "length": LENGTH, "vocabulary": VOCABULARY}
    return encoder(2, samples=2, device=DEVICE, **sizes)


def encoder_footprint(
    crew: Crew, schedule: str, microbatches: int, recompute: str = "none"
) -> Footprint:
    batch = tokens(2 * microbatches, LENGTH, VOCABULARY)
    return flushed(crew, small_encoder(), batch, schedule, microbatches, recompute=recompute)


@pytest.mark.parametrize("microbatches", [2, 8])
@pytest.mark.parametrize(
    ("schedule", "in_flight", "most"),
    [
        ("naive", None, [1, 1, 1, 1]),
        ("gpipe", None, [99, 99, 99, 99]),
        ("1f1b", None, [4, 3, 2, 1]),  # DAPPLE's P_A
        ("1f1b", [7, 5, 3, 1], [7, 5, 3, 1]),  # P_B
        ("1f1b-so", None, [8, 6, 4, 2]),
        ("zb-h1", None, [4, 4, 4, 4]),
    ],
)
def test_microbatches_in_flight(
    crew: Crew, schedule: str, in_flight: Sequence[int] | None, most: list[int], microbatches: int
) -> None:
    batch = vectors(SAMPLES * microbatches)
    found = flushed(crew, perceptron(), batch, schedule, microbatches, in_flight)
    assert list(found.in_flight) == [min(k, microbatches) for k in most]
    rows = generate(schedule, STAGES, microbatches, in_flight=in_flight)
    assert list(found.in_flight) == max_in_flight(rows)


@pytest.mark.parametrize("in_flight", [None, [7, 5, 3, 1]])
def test_mini_batches_in_flight_without_a_flush(crew: Crew, in_flight: list[int] | None) -> None:
    """In PipeDream's NOAM, a stage holds as many mini-batches as stages remain, itself included."""
    found = streamed(crew, perceptron(), vectors(SAMPLES), in_flight)
    assert list(found.in_flight) == (in_flight or [4, 3, 2, 1])


class Chain(nn.Module):
    """Four layers; the first three share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.parts[1].weight = self.parts[2].weight = self.parts[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


@functools.cache
def chain() -> CutModel:
    captured = Captured(Chain(), F.cross_entropy, vectors(SAMPLES))
    return CutModel(captured, hp.optim.adam(lr=1e-2), (1, 2, 3), DEVICE)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "pipedream", "pipedream, tied"])
def test_bytes_equal_a_count_of_all_buffers(
    crew: Crew, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage counts each frame once; the test visits every buffer after every pass."""
    walked = [0] * STAGES

    def walk(stage: Any, version: Any) -> None:
        weights = stage.weights
        versions = [weights.present, version]
        if isinstance(weights, Stashed):
            versions += [*weights._recent.values(), *weights._held.values()]
        versions += stage.loans._borrowed.values()
        tables = [stage.store.entries, *stage.frames._frames.values(), *versions]
        number = stage.number
        nbytes = nbytes_of(buffer for table in tables for buffer in table)
        walked[number] = max(walked[number], nbytes)

    account, update = Stage._account, Stage.update

    def accounting(stage: Any, number: int, which: Any, frame: Any, version: Any) -> None:
        account(stage, number, which, frame, version)
        walk(stage, version)

    def updating(stage: Any, lr: float, grad_scale: float) -> None:
        present = stage.weights.present
        update(stage, lr, grad_scale)
        walk(stage, present)

    monkeypatch.setattr(Stage, "_account", accounting)
    monkeypatch.setattr(Stage, "update", updating)
    if schedule.startswith("pipedream"):
        subject = chain() if "tied" in schedule else perceptron()
        found = streamed(crew, subject, vectors(SAMPLES))
    else:
        found = flushed(crew, perceptron(), vectors(SAMPLES * 6), schedule, 6)
    assert list(found.peak_nbytes) == walked


@pytest.mark.slow
def test_gpipe_grows_with_its_microbatches_and_dapple_does_not(crew: Crew) -> None:
    """Table 5 of DAPPLE: GPipe holds the saved tensors of each additional micro-batch.

    DAPPLE holds no more.
    """
    gpipe = [encoder_footprint(crew, "gpipe", count).peak_nbytes for count in (2, 8, 16)]
    dapple = [encoder_footprint(crew, "1f1b", count).peak_nbytes for count in (2, 8, 16)]
    saved = [stage.passes[2].saved_nbytes for stage in small_encoder().graphs(2)]
    for stage, nbytes in enumerate((saved[0], saved[1] + 4)):  # the loss of the last stage
        assert gpipe[1][stage] - gpipe[0][stage] == 6 * nbytes
        assert gpipe[2][stage] - gpipe[1][stage] == 8 * nbytes
    assert dapple[0] == dapple[1] == dapple[2]
    assert all(less < more for less, more in zip(dapple[2], gpipe[2], strict=True))


@pytest.mark.slow
def test_recompute_holds_less(crew: Crew) -> None:
    none, cut, inputs = (
        encoder_footprint(crew, "gpipe", 16, mode).peak_nbytes
        for mode in ("none", "min-cut", "inputs")
    )
    for stage in range(2):
        assert inputs[stage] < cut[stage] < none[stage]


@pytest.mark.wide
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "pipedream"])
@pytest.mark.parametrize("model", ["perceptron", "encoder", "chain"])
def test_prediction_equals_the_count_plus_the_buffers_of_the_cuts(
    crew: Crew, model: str, schedule: str
) -> None:
    """The planner counts a second buffer for each crossing tensor and omits little."""
    subject = {"perceptron": perceptron, "encoder": small_encoder, "chain": chain}[model]()
    samples = 2 if model == "encoder" else SAMPLES
    make = vectors if model != "encoder" else lambda n: tokens(n, LENGTH, VOCABULARY)
    if schedule == "pipedream":
        found = streamed(crew, subject, make(samples))
    else:
        found = flushed(crew, subject, make(samples * 8), schedule, 8)
    cuts = [
        0,
        *(subject.costs(samples).table.layers[cut - 1].cut_nbytes for cut in subject.cuts),
        0,
    ]
    predicted = predicted_nbytes(subject, samples, found)
    for stage, (counted, nbytes) in enumerate(zip(found.peak_nbytes, predicted, strict=True)):
        crossing = cuts[stage] + cuts[stage + 1]
        inputs = 8 * samples * LENGTH * 2  # tokens, or smaller inputs
        assert crossing - inputs - 64 <= nbytes - counted <= crossing


class Shared(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(x)))


def test_a_shared_parameter_counts_once_in_a_stage(crew: Crew) -> None:
    captured = Captured(Shared(), F.cross_entropy, vectors(SAMPLES))
    whole = CutModel(captured, hp.optim.adam(lr=1e-2), (), DEVICE)
    found = flushed(crew, whole, vectors(SAMPLES * 2), "gpipe", 2)
    (predicted,), (counted,) = predicted_nbytes(whole, SAMPLES, found), found.peak_nbytes
    assert abs(predicted - counted) < 64 + 20 * SAMPLES * 8
