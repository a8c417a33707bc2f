"""A training saves checkpoints by itself, and a pipeline that is made again continues from them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from delayed import ADAM, batch, capture, task
from pipelines import pipeline
from torch import nn

import hetpipe as hp
from hetpipe import checkpoint
from hetpipe.checkpoint import durable
from hetpipe.crew.crew import Crew
from hetpipe.errors import CheckpointError, HetpipeError, PlanError
from hetpipe.pipeline.training import Training

STEPS = 11


def open_saving(crew: Crew, folder: Path, schedule: str = "1f1b", **options: Any) -> hp.Pipeline:
    options = {"cuts": [1], "microbatches": 1, "schedule": schedule, "every": 3} | options
    return hp.Pipeline(
        *task(), cluster=crew.cluster, crew=crew, captured=capture(), optimizer=ADAM[0],
        checkpoint=folder, progress=False, **options,
    )  # fmt: skip


def data() -> Iterator[Any]:
    return (batch(number) for number in range(STEPS))


def train(pipe: hp.Pipeline, most: int = STEPS) -> dict[str, torch.Tensor]:
    """Train like a script of a user, up to mini-batch `most`; return the weights."""
    for _ in pipe.run(islice(data(), pipe.steps, most)):
        pass
    return pipe.state_dict()


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


def assert_equal(state: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    ("schedule", "accumulate", "saved"),
    [("1f1b", 1, [3, 6, 9]), ("1f1b", 2, [4, 6, 10]), ("pipedream", 1, [3, 6, 9])],
)
def test_a_script_that_is_started_again_ends_with_the_same_weights(
    crew: Crew, tmp_path: Path, schedule: str, accumulate: int, saved: list[int]
) -> None:
    with open_saving(crew, tmp_path / "whole", schedule, accumulate=accumulate) as pipe:
        wanted = train(pipe)
        assert pipe.steps == STEPS
    assert steps(tmp_path / "whole") == saved
    with open_saving(crew, tmp_path / "parts", schedule, accumulate=accumulate) as pipe:
        train(pipe, 7)
    with open_saving(crew, tmp_path / "parts", schedule, accumulate=accumulate) as pipe:
        assert pipe.steps == 6
        state = train(pipe)
    assert steps(tmp_path / "parts") == saved
    assert_equal(state, wanted)


def test_step_saves_as_run_does(crew: Crew, tmp_path: Path) -> None:
    for schedule in ("1f1b", "pipedream"):
        with open_saving(crew, tmp_path / schedule, schedule, keep=1) as pipe:
            for x, y in islice(data(), 7):
                pipe.step(x, y)
        assert steps(tmp_path / schedule) == [6]


def test_a_run_under_a_streaming_schedule_loses_no_result(crew: Crew, tmp_path: Path) -> None:
    with open_saving(crew, tmp_path, "pipedream") as pipe:
        assert [result.index for result in pipe.run(data())] == [*range(STEPS)]


def test_a_saved_folder_is_a_checkpoint(crew: Crew, tmp_path: Path) -> None:
    """The folder and each of its sub-folders can be loaded and restored."""
    with open_saving(crew, tmp_path) as pipe:
        train(pipe, 6)
        wanted = pipe.state_dict()
        train(pipe, 8)
        pipe.restore(tmp_path / "step-00000003")
        assert pipe.steps == 3
        pipe.restore(tmp_path)
        assert pipe.steps == 6
        assert_equal(pipe.state_dict(), wanted)
    options: dict[str, Any] = {"cluster": crew.cluster, "crew": crew, "optimizer": ADAM[0]}
    with hp.Pipeline.load(tmp_path, *task(1), captured=capture(), **options) as pipe:
        assert pipe.steps == 6
        assert_equal(pipe.state_dict(), wanted)


def test_load_begins_elsewhere_until_the_own_folder_has_a_checkpoint(
    crew: Crew, tmp_path: Path
) -> None:
    with pipeline(crew, *task(), "01", optimizer=ADAM[0]) as pipe:
        train(pipe, 4)
        pipe.save(tmp_path / "base")
    options: dict[str, Any] = {
        "cluster": crew.cluster, "crew": crew, "optimizer": ADAM[0], "captured": capture(),
        "checkpoint": tmp_path / "run", "every": 3,
    }  # fmt: skip
    for begin, end in ((4, 7), (6, 8)):
        with hp.Pipeline.load(tmp_path / "base", *task(), **options) as pipe:
            assert pipe.steps == begin
            train(pipe, end)
            assert steps(tmp_path / "run") == [6]


def test_save_adds_a_checkpoint_to_the_folder(crew: Crew, tmp_path: Path) -> None:
    with open_saving(crew, tmp_path) as pipe:
        train(pipe, 7)
        pipe.save(tmp_path, notes={"place": 7})
        assert checkpoint_steps(tmp_path) == [3, 6, 7]
        pipe.save(tmp_path, notes={"place": 8})
        wanted = pipe.state_dict()
    with open_saving(crew, tmp_path) as pipe:
        assert pipe.steps == 7
        assert_equal(pipe.state_dict(), wanted)
        assert pipe.restore(tmp_path) == {"place": 8}
        train(pipe, 9)
    assert checkpoint_steps(tmp_path) == [6, 7, 9]


def test_save_raises_the_error_of_its_write(crew: Crew, tmp_path: Path, full: None) -> None:
    with open_saving(crew, tmp_path) as pipe:
        pipe.step(*batch(0))
        with pytest.raises(CheckpointError, match="No space left"):
            pipe.save(tmp_path)
        pipe.step(*batch(1))


def test_a_training_that_was_given_up_is_not_continued(crew: Crew, tmp_path: Path) -> None:
    with open_saving(crew, tmp_path) as pipe:
        train(pipe, 7)
        for _ in range(2):  # as if a worker were lost during the first one
            pipe.restore(tmp_path / "step-00000003")
        pipe.step(*batch(3))
    assert checkpoint_steps(tmp_path) == [3, 4]


def test_where_a_training_continues_is_told(
    crew: Crew, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    with open_saving(crew, tmp_path) as pipe:
        train(pipe)
    (damaged,) = (tmp_path / "step-00000009").glob("state-*")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    options: dict[str, Any] = {
        "cluster": crew.cluster, "crew": crew, "optimizer": ADAM[0], "captured": capture(),
    }  # fmt: skip
    with hp.Pipeline(*task(), checkpoint=tmp_path, **options) as pipe:
        assert pipe.steps == 6
    assert f"continues from {tmp_path / 'step-00000006'}" in capsys.readouterr().err
    assert [damaged.name in record.getMessage() for record in caplog.records] == [True]


def test_a_plan_for_lost_devices_is_made_again(
    crew: Crew, tmp_path: Path, priced: None, caplog: Any
) -> None:
    with open_saving(crew, tmp_path) as pipe:
        train(pipe, 3)
        wanted = pipe.state_dict()
    only = hp.Cluster((crew.cluster.members[1],), transport="local")
    options: dict[str, Any] = {"cluster": only, "optimizer": ADAM[0], "progress": False}
    with pytest.raises(PlanError, match="not run here"):
        hp.Pipeline.load(tmp_path, *task(), **options)
    with hp.Pipeline(*task(), checkpoint=tmp_path, **options) as pipe:
        assert (pipe.plan.devices, pipe.steps) == (("m1",), 3)
        assert_equal(pipe.state_dict(), wanted)
    assert any("m0, which the cluster lacks" in each.getMessage() for each in caplog.records)


@pytest.mark.parametrize("returns", [True, False])
def test_devices_that_are_back_are_planned_for(
    crew: Crew, tmp_path: Path, priced: None, caplog: Any, returns: bool
) -> None:
    alone = hp.Cluster((crew.cluster.members[1],), transport="local")
    options: dict[str, Any] = {"optimizer": ADAM[0], "progress": False, "checkpoint": tmp_path}
    with hp.Pipeline(*task(), cluster=alone, microbatches=4, **options) as pipe:
        train(pipe, 3)
        pipe.save(tmp_path)
        wanted = pipe.state_dict()
    cluster = hp.Cluster(crew.cluster.members, transport="local") if returns else alone
    with hp.Pipeline(*task(), cluster=cluster, **options) as pipe:
        assert (pipe.steps, pipe.plan.microbatches) == (3, 4)
        assert {*pipe.plan.all_devices} == {*cluster.ids}
        assert_equal(pipe.state_dict(), wanted)
    told = [each.getMessage() for each in caplog.records]
    assert any("saved without m0, m2, m3: the training" in each for each in told) is returns


# The thread.


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let files be written only after this event is set."""
    event, write = threading.Event(), durable.write

    def slow(path: Path, parts: Any) -> tuple[int, str]:
        assert event.wait(30)
        return write(path, parts)

    monkeypatch.setattr(durable, "write", slow)
    return event


def test_the_training_continues_during_a_write(
    crew: Crew, tmp_path: Path, gate: threading.Event
) -> None:
    with open_saving(crew, tmp_path) as pipe:
        train(pipe, 3)
        wanted = pipe.state_dict()
        train(pipe, 5)
        assert not checkpoint_steps(tmp_path)
        gate.set()
    assert checkpoint_steps(tmp_path) == [3]  # close has waited
    saved = checkpoint.load(tmp_path)
    assert_equal({n: torch.from_numpy(a) for n, a in saved.tensors["param"].items()}, wanted)


def checkpoint_steps(folder: Path) -> list[int]:
    return [step for step in steps(folder) if (folder / f"step-{step:08}/manifest.json").exists()]


def test_the_next_checkpoint_waits_for_the_write_under_way(
    crew: Crew, tmp_path: Path, gate: threading.Event
) -> None:
    timer = threading.Timer(0.2, gate.set)
    with open_saving(crew, tmp_path) as pipe:
        timer.start()
        train(pipe, 6)
        assert checkpoint_steps(tmp_path)[:1] == [3]
    assert checkpoint_steps(tmp_path) == [3, 6]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(path: Path, parts: Any) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(durable, "write", fail)
        yield


FULL = r"cannot save a checkpoint in .*step-00000003: .*No space left on device; make room"


def test_the_error_of_a_write_is_raised_by_the_next_call_once(
    crew: Crew, tmp_path: Path, full: None, caplog: Any
) -> None:
    with open_saving(crew, tmp_path) as pipe:
        runs = pipe.run(data())
        for _ in range(3):
            next(runs)
        join_writer()
        assert "No space left" in caplog.text
        with pytest.raises(CheckpointError, match=FULL):
            pipe.state_dict()
        assert pipe.steps == 3
        pipe.step(*batch(3))


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_a_write_that_fails_takes_no_result(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schedule: str
) -> None:
    """It may fail while a mini-batch is trained. The result comes first, and then the error."""
    fails = threading.Event()

    def fail(path: Path, parts: Any) -> tuple[int, str]:
        fails.wait()
        raise OSError(28, "No space left on device")

    def and_end_write(train: Any) -> Any:
        def ended(self: Training, *args: Any) -> Any:
            result = train(self, *args)
            if self.steps == 4:
                fails.set()
                join_writer()
            return result

        return ended

    monkeypatch.setattr(durable, "write", fail)
    for name in ("step", "admit"):
        monkeypatch.setattr(Training, name, and_end_write(getattr(Training, name)))
    found: list[int] = []
    with open_saving(crew, tmp_path / "run", schedule) as pipe:
        with pytest.raises(CheckpointError, match=FULL):
            found.extend(result.index for result in pipe.run(data()))
        assert pipe.steps == 4
    fails.clear()
    with open_saving(crew, tmp_path / "steps", schedule) as pipe:
        step_thrice(pipe)
        pipe.step(*batch(3))
        with pytest.raises(CheckpointError, match=FULL):
            pipe.step(*batch(4))
        assert pipe.steps == 4
    assert found == [0, 1, 2, 3]


def join_writer() -> None:
    for thread in threading.enumerate():
        if thread.name == "hetpipe checkpoint":
            thread.join()


def test_close_raises_the_error_of_the_last_write(crew: Crew, tmp_path: Path, full: None) -> None:
    pipe = open_saving(crew, tmp_path)
    step_thrice(pipe)
    with pytest.raises(CheckpointError, match=FULL):
        pipe.close()


def test_another_error_hides_the_error_of_the_last_write(
    crew: Crew, tmp_path: Path, full: None, caplog: Any
) -> None:
    def fail() -> None:
        with open_saving(crew, tmp_path) as pipe:
            step_thrice(pipe)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "No space left" in caplog.text


def step_thrice(pipe: hp.Pipeline) -> None:
    for x, y in islice(data(), 3):
        pipe.step(x, y)


def test_values_that_are_not_finite_replace_nothing(crew: Crew, tmp_path: Path) -> None:
    with open_saving(crew, tmp_path, every=1) as pipe:
        pipe.step(*batch(0))
        pipe._crew.write("param", {"0.0.bias": np.full(8, np.inf)})
        pipe._autosave._thread.join()  # type: ignore[union-attr]
        pipe._autosave.save(pipe._training)
        with pytest.raises(CheckpointError, match=r"the param '0.0.bias' is not finite"):
            pipe.close()
    assert checkpoint_steps(tmp_path) == [1]


# Refusals.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"every": 0}, "every=0: give a whole number of 1 or more"),
        ({"keep": True}, "keep=True: give a whole number of 1 or more"),
        ({"checkpoint": None}, "every=3: give checkpoint= as well"),
        ({"checkpoint": ""}, "no file can have the path ''"),
        ({"optimizer": None, "every": 100}, "no optimizer, so checkpoint would have no effect"),
    ],
)
def test_options_that_are_wrong(
    crew: Crew, tmp_path: Path, options: dict[str, Any], match: str
) -> None:
    options = {"checkpoint": tmp_path, "every": 3, "optimizer": ADAM[0]} | options
    with pytest.raises(HetpipeError, match=match):
        hp.Pipeline(*task(), cluster=crew.cluster, crew=crew, **options)


def test_two_pipelines_do_not_share_a_folder(crew: Crew, tmp_path: Path) -> None:
    pipe, match = open_saving(crew, tmp_path), "another pipeline of this process"
    with pipe, pytest.raises(CheckpointError, match=match):
        open_saving(crew, tmp_path)
    with pytest.raises(PlanError, match="ascending"):
        open_saving(crew, tmp_path, cuts=[2, 1])
    with pytest.raises(PlanError, match="a cut is the number"):
        open_saving(crew, tmp_path, cuts=[99])
    open_saving(crew, tmp_path).close()  # an error leaves the folder free


def test_fit_is_refused(crew: Crew, tmp_path: Path) -> None:
    pipe, match = open_saving(crew, tmp_path), r"fit\(folder=.*leave checkpoint= out"
    with pipe, pytest.raises(HetpipeError, match=match):
        pipe.fit([batch(0)], epochs=1)


def test_extra_state_is_told_at_the_start(crew: Crew, tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> int:
            return 1

        def set_extra_state(self, state: int) -> None: ...

    model, loss_fn, example = nn.Sequential(Extra(6, 3).double()), *task()[1:]
    with pytest.warns(UserWarning, match="does not hold 0._extra_state"):
        hp.Pipeline(
            model, loss_fn, example, cluster=crew.cluster, crew=crew, optimizer=ADAM[0],
            cuts=[], microbatches=1, schedule="1f1b", checkpoint=tmp_path, progress=False,
        ).close()  # fmt: skip
