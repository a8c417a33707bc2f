"""Weights and states travel in pieces, so that they need little memory in the controller."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import hosts
from crews import Crews
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe.checkpoint.series import load
from hetpipe.crew.crew import Crew
from hetpipe.crew.places import PIECE_NBYTES

DEVICE = "numpy:cpu:0"
WIDTH, LAYERS = 1024, 14
TENSOR = 4 * WIDTH**2
MODEL = LAYERS * TENSOR
X = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
Y = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2))
EXTRA = 3 * PIECE_NBYTES
"""Bytes beyond the result: a piece in use, the next piece that arrives, and small change."""


@pytest.fixture(params=[1, 2], ids=["1 host", "2 hosts"])
def crew(request: pytest.FixtureRequest, crews: Crews) -> Iterator[Crew]:
    if request.param == 1:
        yield crews((DEVICE,) * 2, "shared-memory")
        return
    with hosts(f"h1/{DEVICE}", f"h2/{DEVICE}") as cluster, Crew.start(cluster) as crew:
        yield crew


def open_pipeline(crew: Crew, model: nn.Module, checkpoint: Path | None = None) -> hp.Pipeline:
    return pipeline(
        crew, model, nn.functional.mse_loss, (X, Y), "01",
        optimizer=hp.optim.sgd(lr=1e-3, momentum=0.9), checkpoint=checkpoint,
    )  # fmt: skip


def extra_nbytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return a call's result, and the most bytes that were allocated during the call."""
    tracemalloc.start()
    try:
        result = call()
        return result, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_states_are_saved_and_restored_in_pieces(crew: Crew, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with open_pipeline(crew, model) as pipe:
        pipe.step(X, Y)
        state, nbytes = extra_nbytes(pipe.state_dict)
        assert MODEL < nbytes < MODEL + EXTRA
        _, nbytes = extra_nbytes(lambda: pipe.save(tmp_path))
        assert nbytes < EXTRA
        pipe.step(X, Y)
        after, (_, nbytes) = pipe.state_dict(), extra_nbytes(lambda: pipe.restore(tmp_path))
        assert nbytes < EXTRA
        assert all(torch.equal(state[name], value) for name, value in pipe.state_dict().items())
        pipe.step(X, Y)
        assert all(torch.equal(after[name], value) for name, value in pipe.state_dict().items())
    saved = load(tmp_path).tensors
    assert all(torch.equal(state[n], torch.from_numpy(v)) for n, v in saved["param"].items())
    assert not any(torch.equal(state[name], before[name]) for name in before)
