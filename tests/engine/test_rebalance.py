"""Layers move while a model trains: the losses stay the same, and other layers stay in place."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crews import Crews
from pipelines import pipeline
from priced import Speeds, batch, count, losses, mixed, open_planned

import hetpipe as hp
from hetpipe.capture.program import PARAM, STATE
from hetpipe.crew.crew import Crew
from hetpipe.errors import ClusterError, HetpipeError, WorkerError
from hetpipe.pipeline.learning import WINDOW
from hetpipe.wire.messages import Load, Write

PAIR = ("numpy:cpu:0",) * 2
TRIO = ("numpy:cpu:0",) * 3


@pytest.fixture
def pair(crews: Crews) -> Crew:
    return crews(PAIR)


def close(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_moves_change_no_loss(pair: Crew, speeds: Speeds, schedule: str) -> None:
    """Layers move there and back, and one of two tied layers changes its stage."""
    with open_planned(pair, mixed(), schedule=schedule) as pipe:
        wanted = losses(pipe, 0, 12)
        state = pipe.state_dict()
    with open_planned(pair, mixed(), schedule=schedule) as pipe:
        trained = losses(pipe, 0, 4)
        before = pipe.plan
        speeds["m0"] = 3.0
        answer = pipe.rebalance()
        assert answer.moved, answer
        assert answer.after_s < answer.before_s
        assert count(pipe.plan, "m0") < count(before, "m0")
        assert (pipe.plan.schedule, pipe.plan.microbatches) == (schedule, 3)
        trained += losses(pipe, 4, 8)
        speeds["m0"] = 1.0
        trained += losses(pipe, 8, 11)
        assert pipe.rebalance().moved
        assert pipe.plan.step_s == pytest.approx(before.step_s)
        trained += losses(pipe, 11, 12)
        close(pipe.state_dict(), state)
    assert trained == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "far"), [("stash", False), ("stash", True), ("pipeoptim", True)]
)
def test_a_stream_flushes_and_continues(
    pair: Crew, speeds: Speeds, tmp_path: Path, weights: str, far: bool
) -> None:  # fmt: skip
    """The losses equal a run that flushed there and resumed with the new plan. The tied layers are
    neighbours, or on two stages."""
    options: dict[str, Any] = {"schedule": "pipedream", "weights": weights, "microbatches": 1}
    with open_planned(pair, mixed(far=far), **options) as pipe:
        trained = losses(pipe, 0, 6)
        pipe.save(tmp_path)
        speeds["m0"] = 3.0
        assert pipe.rebalance().moved
        trained += losses(pipe, 6, 12)
        plan, costs, state = pipe.plan, pipe.costs, pipe.state_dict()
    with open_planned(pair, mixed(far=far), **options) as pipe:
        assert count(pipe.plan, "m0") > count(plan, "m0")
        wanted = losses(pipe, 0, 6)
    model = mixed(far=far)
    with hp.Pipeline.load(
        tmp_path, model, torch.nn.functional.mse_loss, batch(0), cluster=pair.cluster, crew=pair,
        optimizer=hp.optim.adamw(lr=1e-2), plan=plan, costs=costs,
    ) as pipe:  # fmt: skip
        wanted += losses(pipe, 6, 12)
        close(state, pipe.state_dict())
    assert trained == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_auto_moves_between_steps(
    pair: Crew, speeds: Speeds, caplog: pytest.LogCaptureFixture, schedule: str
) -> None:  # fmt: skip
    """Layers move after the second window that predicts enough gain, and no result is lost."""
    caplog.set_level(logging.INFO, "hetpipe")
    model = mixed(far=False)
    options: dict[str, Any] = {"schedule": schedule, "microbatches": 3}
    with open_planned(pair, model, rebalance="auto", **options) as pipe:
        before = pipe.plan
        results = pipe.run(batch(b) for b in range(7 * WINDOW))
        taken = [next(results) for _ in range(WINDOW)]
        speeds["m0"] = 3.0
        for result in results:
            taken.append(result)
            if len(taken) == 2 * WINDOW - 1:
                assert pipe.plan == before
        assert [result.index for result in taken] == list(range(7 * WINDOW))
        assert count(pipe.plan, "m0") < count(before, "m0")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2, said
    assert "moved from m0 to m1" in said[0]
    assert "since m0 takes 3.00, m1 takes 1.00 times its profiled time" in said[0]
    assert "promised to save" in said[1]


def test_only_moved_layers_are_sent(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of three stages is not reloaded;

    the others keep the values of the layers they keep.
    """
    crew = crews(TRIO)
    loads: list[Load] = []
    writes: list[Write] = []
    send = crew._fleet.send

    def listen(worker: int, message: Any) -> None:
        if isinstance(message, Load):
            loads.append(message)
        elif isinstance(message, Write):
            writes.append(message)
        send(worker, message)

    monkeypatch.setattr(crew._fleet, "send", listen)
    task = mixed(far=False), torch.nn.functional.mse_loss, batch(0)
    options: dict[str, Any] = {"optimizer": hp.optim.adamw(lr=1e-2), "cuts": [2, 3]}
    with pipeline(crew, *task, "012", "1f1b", 3, **options) as pipe:
        losses(pipe, 0, 4)
        loads.clear()
        writes.clear()
        ends = 0, 2, 4, 6
        stages = zip(pipe.plan.stages, ends, ends[1:], strict=False)
        moved = tuple(replace(stage, lo=lo, hi=hi) for stage, lo, hi in stages)
        pipe._training.move(replace(pipe.plan, stages=moved))
        losses(pipe, 4, 5)
    first, second, third = loads
    assert (first.stages, first.stay) == ((), (0,))
    written = [name for write in writes if write.role == PARAM for name in write.values]
    assert {write.stage for write in writes} == {1}
    assert sorted(written) == ["drop1.0.bias", "drop1.0.weight"]
    assert len(second.stages) == 1
    states = [name for role, name in third.stages[0].held if role == STATE]
    assert len(states) == 2 * len([role for role, _ in third.stages[0].held if role == PARAM])


def test_a_worker_killed_during_a_move_is_named(
    pair: Crew, speeds: Speeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """The error is clear, the checkpoint is complete, and training continues from it."""
    cluster = hp.Cluster(pair.cluster.members, transport="shared-memory")
    with Crew.start(cluster) as crew:
        pipe = open_planned(crew, mixed())
        losses(pipe, 0, 4)
        pipe.save(tmp_path)
        speeds["m0"] = 3.0
        (pid,) = crew.call(["m1"], "engine_backends:pid")
        send = crew._fleet.send

        def kill(worker: int, message: Any) -> None:
            send(worker, message)
            if isinstance(message, Load) and worker == 1:
                os.kill(pid, signal.SIGKILL)

        monkeypatch.setattr(crew._fleet, "send", kill)
        with pytest.raises(WorkerError, match=r"worker 'm1' .* was killed by SIGKILL"):
            pipe.rebalance()
        with pytest.raises(WorkerError, match="SIGKILL"):
            pipe.step(*batch(4))
    with open_planned(pair, mixed(), resume=hp.checkpoint.load(tmp_path)) as pipe:
        assert pipe.steps == 4
        losses(pipe, 4, 5)


def test_the_plan_of_a_checkpoint_may_change(pair: Crew, speeds: Speeds, tmp_path: Path) -> None:
    """The plan is only the start of the resumed training, so it may change."""
    with open_planned(pair, mixed()) as pipe:
        losses(pipe, 0, 4)
        pipe.save(tmp_path)
        plan = pipe.plan
    task = mixed(), torch.nn.functional.mse_loss, batch(0)
    with hp.Pipeline.load(
        tmp_path, *task, cluster=pair.cluster, crew=pair, optimizer=hp.optim.adamw(lr=1e-2),
        rebalance="auto",
    ) as pipe:  # fmt: skip
        assert pipe.plan == plan
        speeds["m0"] = 3.0
        losses(pipe, 4, 4 + 2 * WINDOW + 1)
        assert count(pipe.plan, "m0") < count(plan, "m0")


def test_accumulated_gradients_forbid_a_move(pair: Crew, speeds: Speeds) -> None:
    with open_planned(pair, mixed(), accumulate=2) as pipe:
        losses(pipe, 0, 5)
        speeds["m0"] = 3.0
        with pytest.raises(HetpipeError, match="1 mini-batches are accumulated since the last"):
            pipe.rebalance()
        losses(pipe, 5, 6)
        assert pipe.rebalance().moved


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"cuts": [2]}, r"cuts \[2\] say where every layer is"),
        ({"replicas": [2]}, "replicas do not move"),
        ({"schedule": "data-parallel"}, "replicas do not move"),
        ({"schedule": "interleaved"}, "under interleaved layers do not move"),
        ({"schedule": "asp", "microbatches": 1}, "under asp layers do not move"),
    ],
)
def test_the_reason_against_a_move_is_named(
    pair: Crew, speeds: Speeds, monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any], why: str,
) -> None:  # fmt: skip
    with open_planned(pair, mixed(far=False), **options) as pipe:
        with pytest.raises(HetpipeError, match=f"rebalance: .*{why}"):
            pipe.rebalance()
        plan, costs = pipe.plan, pipe.costs

    def nothing(*args: Any) -> Any:
        raise AssertionError("nothing may be measured")

    monkeypatch.setattr("hetpipe.pipeline.planning.profile", nothing)
    with pytest.raises(HetpipeError, match=f"rebalance='auto': .*{why}"):
        open_planned(pair, mixed(far=False), rebalance="auto", **options)
    given = {"plan": plan, "costs": costs, "schedule": "auto", "microbatches": None}
    with pytest.raises(HetpipeError, match="rebalance='auto': a given plan fixes every"):
        open_planned(pair, mixed(far=False), rebalance="auto", **given)


def test_invalid_arguments_are_refused(pair: Crew, speeds: Speeds) -> None:
    with pytest.raises(HetpipeError, match="rebalance='always': give 'auto'"):
        open_planned(pair, mixed(), rebalance="always")
    with (
        open_planned(pair, mixed()) as pipe,
        pytest.raises(HetpipeError, match="steps=0: give a whole"),
    ):
        pipe.rebalance(steps=0)
    one = open_planned(pair, mixed())
    open_planned(pair, mixed())
    with pytest.raises(HetpipeError, match="crew now has the stages of another pipeline"):
        one.rebalance()


def test_an_unprofitable_move_is_not_made(pair: Crew, speeds: Speeds) -> None:
    with open_planned(pair, mixed()) as pipe:
        assert not pipe.rebalance().moved
        losses(pipe, 0, 4)
        plan = pipe.plan
        speeds["m0"] = 1.02
        answer = pipe.rebalance()
        assert not answer.moved
        assert "layers move only to save more than" in answer.why
        assert pipe.plan == plan


@pytest.mark.slow
def test_a_changed_emulated_speed_is_learned(pair: Crew, priced: None) -> None:
    """The speed is learned from the passes, and costs are labelled emulated meanwhile."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(20, 20) for _ in range(6)))
    with open_planned(pair, model) as pipe:
        counts = []
        for speed in (1.0, 0.1, 1.0):
            pipe.set_speed("m0", speed)
            losses(pipe, pipe.steps, pipe.steps + 2 * WINDOW)
            pipe.rebalance(steps=10**6)
            counts.append(count(pipe.plan, "m0"))
            label = "measured" if speed == 1.0 else "emulated"
            assert pipe.costs.devices["m0"].label == label
        with pytest.raises(ClusterError, match=r"m0: speed is 1\.5, it must be above 0, at most 1"):
            pipe.set_speed("m0", 1.5)
        with pytest.raises(HetpipeError, match="no member 'm7'; the crew has m0, m1"):
            pipe.set_speed("m7", 0.5)
    assert counts[1] < min(counts[0], counts[2]), counts
