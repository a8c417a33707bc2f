"""A loss that is not finite: no part of its update is applied.

With flushes, training continues. Without flushes, the state is marked as damaged. Weights that are
not finite never replace a checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipelines import pipeline, user_pipeline
from torch import nn

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError

Batch = tuple[torch.Tensor, torch.Tensor]


class Normed(nn.Module):
    """A batch norm, whose statistics a bad batch would spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)


BAD = (torch.full((8, 6), torch.nan), torch.zeros(8, dtype=torch.int64))


DEVICES = ("numpy:cpu:0",) * 2
ADAM = hp.optim.adam(lr=0.01)


def open_pipeline(crew: Crew, **options: Any) -> hp.Pipeline:
    torch.manual_seed(0)
    task, options = (Normed(), F.cross_entropy, batch(0)), {"optimizer": ADAM, **options}
    if "members" in options:  # replicas with equal shares, whatever their speed
        return pipeline(crew, *task, **options)
    return user_pipeline(crew, *task, **{"cuts": [1], "microbatches": 2, **options})


def train_on(crew: Crew, batches: list[Batch], **options: Any) -> tuple[list[float], Any]:
    """Return the losses and the final state; a refused mini-batch adds no loss."""
    losses = []
    with open_pipeline(crew, **options) as pipe:
        for x, y in batches:
            if x is BAD[0]:
                with pytest.raises(HetpipeError, match="Nothing of this update was applied"):
                    pipe.step(x, y)
            else:
                losses.append(pipe.step(x, y))
        return losses, pipe.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b"},
        {"schedule": "gpipe", "clip_norm": 0.5},
        {"schedule": "zb-h1"},
        {"members": [("m0", "m1")]},
    ],
    ids=["1f1b", "clipped", "halves", "replicas"],
)
def test_training_continues_as_if_the_batch_were_absent(
    crew: Crew, options: dict[str, Any]
) -> None:
    good = [batch(seed) for seed in range(4)]
    expected, without = train_on(crew, good, **options)
    losses, state = train_on(crew, [*good[:2], BAD, *good[2:]], **options)
    assert losses == expected
    for name, value in without.items():
        assert torch.equal(state[name], value), name


@pytest.mark.slow
def test_the_whole_accumulation_is_dropped(crew: Crew) -> None:
    """The accumulators also hold the previous mini-batch's gradients, which are dropped too."""
    good = [batch(seed) for seed in range(5)]
    kept = [good[0], good[1], good[3], good[4]]
    expected, without = train_on(crew, kept, accumulate=2)
    losses, state = train_on(crew, [*good[:3], BAD, *good[3:]], accumulate=2)
    assert [losses[0], losses[1], *losses[3:]] == expected
    assert torch.equal(state["first.weight"], without["first.weight"])


def test_without_a_flush_the_state_cannot_be_saved(crew: Crew, tmp_path: Path) -> None:
    with open_pipeline(crew, schedule="pipedream", microbatches=1) as pipe:
        list(pipe.run([batch(0), batch(1)]))
        pipe.save(tmp_path)
        with pytest.raises(HetpipeError, match="loss of mini-batch 2 is nan"):
            pipe.step(*BAD)
        with pytest.raises(CheckpointError, match=r"mini-batch 2 is nan.*force=True"):
            pipe.save(tmp_path)
        saved = pipe.state_dict()
    assert not torch.isfinite(saved["first.weight"]).all()
    with hp.Pipeline.load(
        tmp_path, Normed(), F.cross_entropy, batch(0), cluster=crew.cluster, crew=crew,
        optimizer=hp.optim.adam(lr=0.01),
    ) as pipe:  # fmt: skip
        assert pipe.steps == 2
        assert all(torch.isfinite(value).all() for value in pipe.state_dict().values())


@pytest.mark.slow
def test_weights_that_are_not_finite_replace_no_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """The loss is finite although the update is not; only the next loss would show it."""

    def steep(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 1e4 * F.cross_entropy(output, y)

    with user_pipeline(
        crew, Normed(), steep, batch(0), cuts=[1], microbatches=2, optimizer=hp.optim.sgd(lr=3e38)
    ) as pipe:
        pipe.save(tmp_path)
        before = (tmp_path / "manifest.json").read_bytes()
        pipe.step(*batch(0))
        with pytest.raises(CheckpointError, match=r"param '\w+\.\w+' is not finite"):
            pipe.save(tmp_path)
        assert (tmp_path / "manifest.json").read_bytes() == before
        with pytest.raises(CheckpointError, match="is not finite"):
            pipe.save(tmp_path / "new" / "folder")
        assert not (tmp_path / "new").exists()
        pipe.save(tmp_path, force=True)
        assert (tmp_path / "manifest.json").read_bytes() != before
