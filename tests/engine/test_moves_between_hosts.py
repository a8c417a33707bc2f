"""Layers and checkpoints move between hosts, and trainings continue as on one host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from agents import hosts
from crews import Crews
from pipelines import pipeline
from priced import Speeds, batch, losses, mixed, open_planned

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.plan.plan import Plan

DEVICE = "numpy:cpu:0"


@pytest.fixture
def two() -> Iterator[Crew]:
    with hosts(f"h0/{DEVICE}", f"h1/{DEVICE}") as cluster, Crew.start(cluster) as crew:
        yield crew


@pytest.fixture
def three() -> Iterator[Crew]:
    with hosts(*(f"h{n}/{DEVICE}" for n in range(3))) as cluster, Crew.start(cluster) as crew:
        yield crew


def members(plan: Plan) -> list[tuple[str, ...]]:
    """Return the members of each layer."""
    return [stage.devices for stage in plan.stages for _ in range(stage.lo, stage.hi)]


def test_layers_move_between_hosts(two: Crew, crews: Crews, speeds: Speeds) -> None:
    with open_planned(crews((DEVICE,) * 2), mixed(far=False)) as pipe:
        wanted = losses(pipe, 0, 12)
        state = pipe.state_dict()
    with open_planned(two, mixed(far=False)) as pipe:
        before = members(pipe.plan)
        trained = losses(pipe, 0, 4)
        speeds["m0"] = 3.0
        assert pipe.rebalance().moved
        after = members(pipe.plan)
        assert after.count(("m0",)) < before.count(("m0",))
        trained += losses(pipe, 4, 8)
        speeds["m0"] = 1.0
        trained += losses(pipe, 8, 11)
        assert pipe.rebalance().moved
        assert members(pipe.plan).count(("m0",)) > after.count(("m0",))
        trained += losses(pipe, 11, 12)
        for name, value in pipe.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=1e-6, atol=1e-8)
    assert trained == pytest.approx(wanted, rel=1e-6)


def test_a_training_of_two_hosts_continues_on_three_and_on_one(
    three: Crew, crews: Crews, tmp_path: Path
) -> None:
    def opened(crew: Crew, places: str, cuts: list[int], checkpoint: Path | None) -> hp.Pipeline:
        return pipeline(
            crew, mixed(), torch.nn.functional.mse_loss, batch(0), places, "1f1b", 3,
            optimizer=hp.optim.adamw(lr=1e-2), cuts=cuts, checkpoint=checkpoint,
        )  # fmt: skip

    with opened(three, "01", [3], None) as pipe:
        losses(pipe, 0, 2)
        pipe.save(tmp_path / "two")
        wanted = losses(pipe, 2, 6)
    with opened(three, "120", [2, 3], tmp_path / "two") as pipe:
        assert losses(pipe, 2, 4) == pytest.approx(wanted[:2], rel=1e-6)
        pipe.save(tmp_path / "three")
    with opened(crews((DEVICE,) * 2), "0", [], tmp_path / "three") as pipe:
        assert losses(pipe, 4, 6) == pytest.approx(wanted[2:], rel=1e-6)
