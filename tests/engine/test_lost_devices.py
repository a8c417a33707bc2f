"""A training goes on without a device that it loses, with the results of an undisturbed one."""

from __future__ import annotations

import itertools
import math
import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import shared
from crews import Crews, eventually
from engine_backends import FaultyBackend
from pipelines import pipeline, user_pipeline
from priced import Speeds, count, losses, mixed, open_planned
from torch import nn

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.table import CostTable, LayerCost
from hetpipe.crew import workers
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.pipeline import journal, stuck, survival
from hetpipe.pipeline.learning import WINDOW
from hetpipe.pipeline.move import Move
from hetpipe.pipeline.planning import free_table
from hetpipe.pipeline.survivors import start_crew
from hetpipe.sdk.host import registry

SAMPLES = 12
DEVICE = "numpy:cpu:0"
LOSS = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    started = Crews()
    yield started
    started.close()


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 8), nn.ReLU(),
        nn.Linear(8, 4),
    )  # fmt: skip


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 6, generator=draw), torch.randint(0, 4, (SAMPLES,), generator=draw))
        for _ in range(count)
    ]


def costs_of(crew: Crew, samples: int = SAMPLES // 4, **others: LayerCost) -> CostTable:
    """Return costs of micro-batches by which layers take a second, or as `others` say by member,
    and messages no time."""
    graph = shared(make_model(), LOSS, batches(1)[0]).layer_graph(samples)
    costs = free_table("case", graph, crew.cluster.ids, "modelled")
    usual = LayerCost(1.0, 1.0, 0.0)
    rows = {
        id: replace(row, layers=(others.get(id, usual),) * len(graph))
        for id, row in costs.devices.items()
    }
    return replace(costs, devices=rows)


def opened(crew: Crew, **options: Any) -> hp.Pipeline:
    members: Any = options.pop("members", "012")
    return pipeline(
        crew, make_model(), LOSS, batches(1)[0], members,
        **{
            "costs": costs_of(crew),
            "optimizer": hp.optim.adamw(lr=1e-2), "microbatches": 4, "survive": "auto",
            "snapshot_every": 3, **options,
        },
    )  # fmt: skip


def pid_of(crew: Crew, member: str) -> int:
    (pid,) = crew.call([member], "engine_backends:pid")
    return int(pid)


def kill(crew: Crew, member: str) -> None:
    os.kill(pid_of(crew, member), signal.SIGKILL)


def trained(
    crew: Crew, at: int = -1, **options: Any
) -> tuple[list[hp.Result], dict[str, torch.Tensor], tuple[hp.Lost, ...]]:
    """Train some mini-batches, and kill a worker after the result number `at`."""
    results, victim = [], pid_of(crew, "m1")
    with opened(crew, **options) as pipe:
        for result in pipe.run(batches(10)):
            results.append(result)
            if result.index == at:
                os.kill(victim, signal.SIGKILL)
        return results, pipe.state_dict(), pipe.lost


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_training_has_the_results_of_an_undisturbed_one(crews: Crews, schedule: str) -> None:
    devices = (DEVICE,) * 3
    whole = trained(crews(devices, "shared-memory"), schedule=schedule)
    broken = trained(crews(devices, "shared-memory"), at=4, schedule=schedule)
    assert [r.index for r in broken[0]] == [*range(10)]
    losses = [[r.loss for r in results] for results in (whole[0], broken[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for name, value in whole[1].items():
        assert torch.allclose(broken[1][name], value, atol=1e-6), name
    (lost,) = broken[2]
    assert lost.members == ("m1",)
    assert "SIGKILL" in lost.why
    assert "m1" not in lost.plan.all_devices
    assert not whole[2]


@pytest.mark.parametrize("transport", ["local", "distributed"])
def test_a_broken_device_is_left_out(
    crews: Crews, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its third run raises an error, whatever the worker is: a thread or a process."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(FaultyBackend)
    devices = (DEVICE, "faulty:raise:0", DEVICE)
    whole = trained(crews((DEVICE,) * 3, transport))
    broken = trained(crews(devices, transport))
    losses = [[r.loss for r in results] for results in (whole[0], broken[0])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert "boom 42" in broken[2][0].why


@pytest.mark.parametrize(("place", "kind"), [(1, "hang"), (0, "stall")])
def test_a_device_that_hangs_is_lost_after_the_limit(
    crews: Crews, monkeypatch: pytest.MonkeyPatch, place: int, kind: str
) -> None:
    """In a forward; or in a last backward, while the others wait in their updates for its norm."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    monkeypatch.setattr(registry, "_instances", dict(registry._instances))
    registry.register_backend(FaultyBackend)
    devices = [DEVICE] * 3
    devices[place] = f"faulty:{kind}:0"
    hanging = crews(tuple(devices), "shared-memory")
    with opened(hanging, pass_limit_s=1.0, schedule="gpipe") as pipe:
        assert pipe.step(*batches(1)[0]) > 0
        (lost,) = pipe.lost
    assert lost.members == (f"m{place}",)
    assert "nothing has moved for 1 s" in lost.why
    if kind == "stall":
        assert re.search(r"'m1' .* waits in 1U.*'m2' .* waits in 2U", lost.why)


def test_checkpoints_continue_after_a_loss(crews: Crews, tmp_path: Path) -> None:
    whole = trained(crews((DEVICE,) * 3, "shared-memory"))
    for kills in (True, False):
        crew = crews((DEVICE,) * 3, "shared-memory")
        with opened(crew) as pipe:
            plan = pipe.plan
        with user_pipeline(
            crew, make_model(), LOSS, batches(1)[0], plan=plan, costs=costs_of(crew),
            optimizer=hp.optim.adamw(lr=1e-2), survive="auto", checkpoint=tmp_path, every=2,
        ) as pipe:  # fmt: skip
            victim = pid_of(crew, "m1")
            for result in pipe.run(batches(10)[pipe.steps :]):
                if result.index == 4 and kills:
                    os.kill(victim, signal.SIGKILL)
            assert len(pipe.lost) == kills
            state = pipe.state_dict()
    for name, value in whole[1].items():
        assert torch.allclose(state[name], value, atol=1e-6), name


def test_a_checkpoint_may_have_a_spare_in_its_plan(crews: Crews, tmp_path: Path) -> None:
    crew, data = crews((DEVICE,) * 3, "local"), batches(3)
    with opened(crew, members="02") as pipe:
        for batch in data[:2]:
            pipe.step(*batch)
        pipe.save(tmp_path)
        wanted = pipe.step(*data[2])
    cluster = hp.Cluster(crew.cluster.members, transport="local")
    with hp.Pipeline.load(
        tmp_path, make_model(), LOSS, data[0], cluster=cluster, progress=False,
        optimizer=hp.optim.adamw(lr=1e-2), survive="auto", spares=["m2"],
    ) as pipe:  # fmt: skip
        assert pipe.plan.devices == ("m0", "m2")
        assert pipe.step(*data[2]) == pytest.approx(wanted, rel=1e-6)


def test_a_recovery_that_fails_leaves_a_pipeline_that_says_so(
    crews: Crews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its new stages were not loaded."""
    crew = crews((DEVICE,) * 3, "shared-memory")
    with opened(crew) as pipe:
        pipe.step(*batches(1)[0])
        kill(crew, "m1")

        def refuse(*args: Any, **options: Any) -> None:
            raise HetpipeError("no room")

        monkeypatch.setattr("hetpipe.crew.crew.Crew.load", refuse)
        with pytest.raises(HetpipeError, match="no room"):
            pipe.step(*batches(1)[0])
        calls: list[Any] = [
            lambda: pipe.step(*batches(1)[0]),
            lambda: pipe.save(tmp_path / "rescue"),
            pipe.state_dict,
            lambda: pipe.predict(batches(1)[0][0]),
            lambda: [*pipe.run(batches(1))],
        ]
        for call in calls:
            with pytest.raises(HetpipeError):
                call()


@pytest.mark.parametrize("given_s", [None, 5.0])
def test_a_pass_in_eval_mode_has_a_limit(crews: Crews, given_s: float | None) -> None:
    """It follows from the latest mini-batches with the same programs."""
    crew, (x, _) = crews((DEVICE,) * 3, "local"), batches(1)[0]
    with opened(crew, pass_limit_s=given_s) as pipe:
        limits = []
        for rows in [SAMPLES] * (stuck.RECENT + 1) + [SAMPLES // 2]:
            pipe.predict(x[:rows])
            limits.append(pipe._training.setup.crew.pass_limit_s)
    if given_s is None:
        assert limits == [None] * stuck.RECENT + [stuck.STUCK_S, None]
    else:
        assert {*limits} == {given_s}


def test_a_new_pipeline_restores_a_checkpoint_of_many_steps(crews: Crews, tmp_path: Path) -> None:
    """It has no result yet that tells how long a step takes."""
    crew, data = crews((DEVICE,) * 3, "local"), batches(stuck.RECENT + 1)
    with opened(crew) as pipe:
        for batch in data[:-1]:
            pipe.step(*batch)
        pipe.save(tmp_path)
        wanted = pipe.step(*data[-1])
    with opened(crew) as pipe:
        pipe.restore(tmp_path)
        assert pipe.step(*data[-1]) == wanted


def test_a_spare_takes_the_place_of_a_lost_member(crews: Crews) -> None:
    devices = (DEVICE,) * 4
    whole = trained(crews(devices, "shared-memory"), schedule="pipedream", spares=["m3"])
    broken = trained(crews(devices, "shared-memory"), 4, schedule="pipedream", spares=["m3"])
    assert [r.loss for r in broken[0]] == [r.loss for r in whole[0]]
    for name, value in whole[1].items():
        assert torch.equal(broken[1][name], value), name
    assert broken[2][0].plan.all_devices == ("m0", "m3", "m2")


def test_a_replay_in_a_stream_begins_after_the_last_move(crews: Crews) -> None:
    found = []
    for kills in (False, True):
        crew, losses = crews((DEVICE,) * 3, "shared-memory"), []
        victim, options = pid_of(crew, "m1"), {"schedule": "pipedream", "snapshot_every": 16}
        with opened(crew, members="01", spares=["m2"], **options) as pipe:
            for result in pipe.run(batches(12)):
                losses.append(result.loss)
                if result.index == 4:
                    first, second = pipe.plan.stages
                    cut = 3 - first.hi
                    stages = replace(first, hi=cut), replace(second, lo=cut)
                    moved = replace(pipe.plan, stages=stages)
                    pipe._rebalancer._next = Move(pipe.plan, moved, 0.0)
                if kills and result.index == 8:
                    os.kill(victim, signal.SIGKILL)
            assert len(pipe.lost) == kills
            found.append((losses, pipe.state_dict()))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(found[1][1][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "moves"),
    [
        ({}, True),
        ({"spares": ["m2"]}, False),
        ({"schedule": "pipedream"}, False),
        ({"cuts": [3]}, False),
    ],
    ids=["planned", "spare", "stream", "fixed"],
)
def test_a_plan_after_a_loss_is_corrected_once(
    crews: Crews, speeds: Speeds, options: dict[str, Any], moves: bool
) -> None:
    """The costs of such a plan were measured beside the lost device. If a spare has taken the place
    of the lost member, and after later changes of speed, no layer moves."""
    crew = crews((DEVICE,) * 3, "shared-memory")
    with open_planned(crew, mixed(), survive="auto", **options) as pipe:
        victim, begun = pid_of(crew, "m0"), pipe.plan
        speeds["m1"] = 3.0
        found = losses(pipe, 0, 3 * WINDOW)
        assert pipe.plan is begun
        os.kill(victim, signal.SIGKILL)
        found += losses(pipe, 3 * WINDOW, 4 * WINDOW)
        first = pipe.lost[0].plan
        found += losses(pipe, 4 * WINDOW, 7 * WINDOW)
        corrected = pipe.plan
        assert (count(corrected, "m1") < count(first, "m1")) is moves
        assert moves or corrected is first
        speeds["m1"] = 0.2
        found += losses(pipe, 7 * WINDOW, 10 * WINDOW)
        assert pipe.plan is corrected
    parts = {name: value for name, value in options.items() if name != "spares"}
    with open_planned(crews((DEVICE,) * 2, "shared-memory"), mixed(), **parts) as pipe:
        wanted = losses(pipe, 0, 10 * WINDOW)
    if "schedule" not in options:  # a stream flushes at its snapshots
        assert found == pytest.approx(wanted, rel=1e-6)


def test_a_member_that_comes_back_joins(crews: Crews, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.pipeline.absent.FIRST_S", 0.0)
    devices = (DEVICE,) * 3
    whole = trained(crews(devices, "shared-memory"))
    crew = crews(devices, "shared-memory")
    victim, many = pid_of(crew, "m1"), itertools.cycle(batches(10))
    with opened(crew) as pipe:
        losses = [pipe.step(*next(many)) for _ in range(4)]
        os.kill(victim, signal.SIGKILL)
        losses += [pipe.step(*next(many)) for _ in range(6)]
        state = pipe.state_dict()
        assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(pipe.joined))
        assert pipe.joined[0].members == ("m1",)
        assert sorted(pipe.plan.all_devices) == ["m0", "m1", "m2"]
    assert losses == pytest.approx([result.loss for result in whole[0]], rel=1e-6)
    for name, value in whole[1].items():
        assert torch.allclose(state[name], value, atol=1e-6), name


@pytest.mark.parametrize("call", ["predict", "evaluate"])
def test_a_member_joins_before_forwards(
    call: str, crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline that only predicts or evaluates has no steps before which members could join."""
    monkeypatch.setattr("hetpipe.pipeline.absent.FIRST_S", 0.0)
    x, y = batches(1)[0]
    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        forwards = {"predict": lambda: pipe.predict(x), "evaluate": lambda: pipe.evaluate([(x, y)])}
        kill(pipe._crew, "m1")
        forwards[call]()
        assert [event.members for event in pipe.lost] == [("m1",)]
        assert eventually(lambda: forwards[call]() is not None and bool(pipe.joined))
        assert sorted(pipe.plan.all_devices) == ["m0", "m1", "m2"]


def test_a_lost_member_has_its_new_speed_once_it_is_back(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetpipe.pipeline.absent.FIRST_S", 0.0)
    many = itertools.cycle(batches(10))
    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        kill(pipe._crew, "m1")
        assert eventually(lambda: pipe._crew._control.failed)
        pipe.set_speed("m1", 0.9)  # the next step survives the loss
        pipe.step(*next(many))
        assert [event.members for event in pipe.lost] == [("m1",)]
        pipe.set_speed("m1", 0.8)
        assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(pipe.joined))
        assert pipe._crew.cluster.member("m1").speed == 0.8
        with pytest.raises(HetpipeError, match="no member 'm7'"):
            pipe.set_speed("m7", 0.5)


def test_a_speed_that_is_set_during_a_recovery_holds(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_and_start(cluster: Cluster) -> Crew:
        setter = threading.Thread(target=pipe.set_speed, args=("m0", 0.7))
        setter.start()
        setter.join()
        return start_crew(cluster)

    monkeypatch.setattr(survival, "start_crew", set_and_start)
    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        kill(pipe._crew, "m1")
        pipe.step(*batches(1)[0])
        assert [event.members for event in pipe.lost] == [("m1",)]
        assert pipe._crew.cluster.member("m0").speed == 0.7


@pytest.mark.parametrize(("rows", "left"), [(12, ["m0", "m1"]), (6, ["m0"])])
def test_no_replica_gets_too_few_rows_after_a_loss(
    rows: int, left: list[str], crews: Crews
) -> None:
    """A slow replica gets two of twelve rows. It would get one of six, and batch norm needs two."""
    (x, y), found = batches(1)[0], []
    for survivors in (["m0", "m1", "m2"], left):
        crew = crews((DEVICE,) * 3, "shared-memory")
        tables = {
            size: costs_of(
                crew, size, m0=LayerCost(size, size, 0.0), m1=LayerCost(4 * size, 4 * size, 0.0)
            )
            for size in (2, SAMPLES)
        }
        plan: Any = {"members": [["m0", "m1", "m2"]], "shares": [(1.0, 1.0, 1.0)]}
        options = {"schedule": "data-parallel", "microbatches": 1, "sync_batch_norm": True}
        with opened(crew, costs=tables[SAMPLES], **plan, **options) as pipe:
            pipe._training.setup = replace(pipe._training.setup, tables=tables)
            losses = [pipe.step(x, y), pipe.step(x[:rows], y[:rows])]
            if survivors is left:
                kill(crew, "m2")
            losses += [pipe.step(x[:rows], y[:rows]), pipe.step(x, y)]
            assert sorted(pipe.plan.all_devices) == survivors
            found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def test_a_budget_that_snapshots_exceed_is_refused(crews: Crews) -> None:
    crew = crews((DEVICE,) * 3, "shared-memory")
    with pytest.raises(HetpipeError, match=r"1000 bytes, and \d+ bytes are missing"):
        opened(crew, snapshot_nbytes=1000)
    with opened(crew) as pipe:
        model = make_model()  # AdamW has two states for each parameter
        parameters_nbytes = sum(value.nbytes for value in model.parameters())
        buffers_nbytes = sum(value.nbytes for value in model.buffers())
        expected_nbytes = 2 * (3 * parameters_nbytes + buffers_nbytes)
        assert pipe.snapshot_nbytes == pytest.approx(expected_nbytes, rel=0.05)


def test_a_restore_needs_no_room_beside_the_snapshots(
    crews: Crews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its snapshots take the place of the present ones, which the free memory does not count."""
    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        pipe.step(*batches(1)[0])
        pipe.save(tmp_path)
        monkeypatch.setattr(survival, "available_nbytes", lambda: 2 * pipe.snapshot_nbytes)
        pipe.restore(tmp_path)
        kill(pipe._crew, "m1")
        assert pipe.snapshot_nbytes > 0
        pipe.step(*batches(1)[0])
        assert len(pipe.lost) == 1


def test_a_spare_that_can_run_no_stage_is_refused(crews: Crews) -> None:
    crew = crews((DEVICE,) * 3, "shared-memory")
    unable = LayerCost(math.inf, math.inf, math.inf, reason="it lacks aten.relu.default")
    with pytest.raises(HetpipeError, match=r"m2 could take the place of no member.*aten\.relu"):
        opened(crew, members="01", spares=["m2"], costs=costs_of(crew, m2=unable))


def test_lost_devices_are_tried_again_when_none_is_left(crews: Crews) -> None:
    """They may have been lost for a moment only, for instance when memory ran out."""
    data = batches(4)
    with opened(crews((DEVICE,) * 2, "shared-memory"), members="01") as whole:
        expected = [whole.step(*batch) for batch in data]
    with opened(crews((DEVICE,) * 2, "shared-memory"), members="01") as pipe:
        losses = [pipe.step(*data[0])]
        for batch, member, left in zip(
            data[1:], ("m0", "m1", "m0"), ("m1", "m0m1", "m1"), strict=True
        ):
            kill(pipe._crew, member)
            losses.append(pipe.step(*batch))
            assert "".join(pipe.plan.all_devices) == left
        assert losses == pytest.approx(expected, rel=1e-6)
        assert [event.members for event in pipe.lost] == [("m0",), ("m1",), ("m0",)]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"survive": "yes"}, "survive='yes' is not known"),
        ({"survive": "off", "spares": ["m1"]}, "spares is given without survive='auto'"),
        ({"survive": "off", "snapshot_every": None, "spares": "m1"}, "give a list"),
        ({"spares": ["m7"]}, "no member 'm7'"),
        ({"spares": ["m0", "m1", "m2"]}, "m0, m1, m2 are all members, and none is left to train"),
        ({"snapshot_every": 0}, "snapshot_every=0"),
        ({"recompute": ["inputs", "none", "none"]}, "give one mode, such as recompute='inputs'"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    crews: Crews, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(HetpipeError, match=words):
        opened(crews((DEVICE,) * 3, "shared-memory"), **options)


def test_a_refused_mini_batch_may_be_trained_later(crews: Crews) -> None:
    """A mini-batch of a new size cannot follow an accumulated one on replicas. Nothing changes by
    that, and so a replay leaves it out."""

    def train(at: int) -> tuple[list[float], dict[str, torch.Tensor]]:
        crew = crews((DEVICE,) * 3, "shared-memory")
        options: dict[str, Any] = {"accumulate": 2, "sync_batch_norm": True, "costs": None}
        options["optimizer"] = hp.optim.sgd(lr=0.1, momentum=0.9)
        replicas = (("m0", "m1", "m2"),)
        with opened(crew, members=replicas, snapshot_every=9, microbatches=1, **options) as pipe:
            (x, y), *rest = batches(4)
            found = [pipe.step(x, y)]
            with pytest.raises(HetpipeError, match="on replicas: call flush"):
                pipe.step(x[:6], y[:6])
            pipe.flush()
            found.append(pipe.step(x[:6], y[:6]))
            if at:
                kill(crew, "m1")
            found += [pipe.step(*batch) for batch in rest]
            assert len(pipe.lost) == at
            return found, pipe.state_dict()

    whole, broken = train(0), train(1)
    assert whole[0] == pytest.approx(broken[0], rel=1e-6)
    for name, value in whole[1].items():
        assert torch.allclose(broken[1][name], value, atol=1e-6), name


def test_a_mini_batch_that_cannot_be_kept_is_not_trained(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(_: Any) -> None:
        raise MemoryError

    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        pipe.step(*batches(1)[0])
        with monkeypatch.context() as patch:
            patch.setattr(journal, "copied", copied)
            with pytest.raises(MemoryError):
                pipe.step(*batches(1)[0])
        assert pipe.steps == 1
        pipe.step(*batches(1)[0])


def test_the_steps_of_lost_devices_limit_no_pass(crews: Crews) -> None:
    """The devices that are left may be slower, also if many mini-batches were trained again."""
    crew = crews((DEVICE,) * 3, "shared-memory")
    with opened(crew, snapshot_every=20) as pipe:
        data = batches(12)
        for batch in data[:10]:
            pipe.step(*batch)
        limits: list[Any] = [pipe._training.setup.crew.pass_limit_s]
        kill(crew, "m1")
        pipe.step(*data[10])
        pipe.step(*data[11])
        limits.append(pipe._training.setup.crew.pass_limit_s)
        assert pipe.lost[0].replayed >= stuck.RECENT
    assert limits[0] >= stuck.STUCK_S
    assert limits[1] is None


def test_a_worker_that_hangs_in_a_copy_is_lost(
    crews: Crews, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "COPY_S", 3.0)
    crew = crews((DEVICE,) * 3, "shared-memory")
    with opened(crew) as pipe:
        plan = pipe.plan
    with user_pipeline(
        crew, make_model(), LOSS, batches(1)[0], plan=plan, costs=costs_of(crew),
        survive="auto", snapshot_every=9, checkpoint=tmp_path, every=2,
    ) as pipe:  # fmt: skip
        data = batches(3)
        pipe.step(*data[0])
        crew.call(["m1"], "engine_backends:hang_in_copies")
        pipe.step(*data[1])  # a checkpoint is due
        pipe.step(*data[2])
        (lost,) = pipe.lost
    assert lost.members == ("m1",)
    assert "no copied value has come for 3 s" in lost.why
    assert any(tmp_path.iterdir())
