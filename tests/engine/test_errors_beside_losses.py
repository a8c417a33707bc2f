"""Errors that are no loss of a device end a call of a training that survives losses, not the
training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from broken_cases import CASES, Batch, batches, difference, opened, starting
from crews import Crews, eventually, has_ended

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, NotFiniteError, WorkerError
from hetpipe.pipeline import survivors
from hetpipe.pipeline.forwards import Forwards

DEVICES = ("numpy:cpu:0",) * 3


@pytest.fixture(scope="module")
def crews() -> Iterator[Crews]:
    started = Crews()
    yield started
    started.close()


def kill(pipe: hp.Pipeline, member: str) -> None:
    (pid,) = pipe._crew.call([member], "engine_backends:pid")
    os.kill(pid, signal.SIGKILL)


def not_finite() -> Batch:
    return torch.full_like(batches(1)[0][0], torch.nan), batches(1)[0][1]


def broken_source() -> Iterator[Batch]:
    yield from batches(2)
    raise OSError("the disk is away")


@pytest.mark.parametrize("name", ["1f1b-spare", "pipedream-spare"])
def test_errors_of_mini_batches_are_errors(crews: Crews, name: str) -> None:
    """They are raised once, and trainings with and without a loss are equal."""
    ends = []
    for breaks in (False, True):
        with opened(CASES[name], crews(("numpy:cpu:0",) * 4, "shared-memory")) as pipe:
            pipe.step(*batches(1)[0])
            if not CASES[name].streams:  # these apply it
                with pytest.raises(NotFiniteError):
                    pipe.step(*not_finite())
            with pytest.raises(HetpipeError, match="sample"):
                pipe.step(batches(1)[0][0][:, :3], batches(1)[0][1])
            if breaks:
                kill(pipe, "m1")
            with pytest.raises(OSError, match="the disk is away"):
                for _ in pipe.run(broken_source()):
                    pass
            ends.append((pipe.steps, pipe.step(*batches(1)[0])))
            assert len(pipe.lost) == breaks
    assert repr(ends[0]) == repr(ends[1])


def spoil(crew: Crew, member: str) -> None:
    if member in crew.cluster.ids:
        crew.begin_each("engine_backends:spoil", {member: ()})


def test_a_mini_batch_that_failed_on_a_lost_device_stays_left_out(crews: Crews) -> None:
    """A device returns NaN before it is lost; the other devices would not."""
    crew = crews(DEVICES, "shared-memory")
    with opened(CASES["1f1b"], crew) as pipe:
        losses = [pipe.step(*batch) for batch in batches(4)]
        state = pipe.state_dict()
    with opened(CASES["1f1b"], crew, snapshot_every=8) as pipe:
        assert pipe.step(*batches(1)[0]) == losses[0]
        spoil(crew, "m1")
        with pytest.raises(NotFiniteError):
            pipe.step(*batches(1)[0])
        kill(pipe, "m1")
        found = [(result.index, result.loss) for result in pipe.run(batches(4)[1:])]
        assert pipe.lost[0].replayed == 1
        assert not difference(found, [*enumerate(losses)][1:], exact=False)
        assert not difference(pipe.state_dict(), state, exact=False)


def test_a_training_that_cannot_be_repeated_ends(crews: Crews) -> None:
    """The spare returns NaN for a mini-batch that was trained before the loss."""
    crew = crews(("numpy:cpu:0",) * 3, "shared-memory")
    with (
        starting(lambda crew: spoil(crew, "m2")),
        opened(CASES["gpipe-spare"], crew) as pipe,
    ):
        pipe.step(*batches(1)[0])
        kill(pipe, "m1")
        with pytest.raises(
            HetpipeError, match=r"mini-batch 0 was trained before .* fails now: the loss of"
        ):
            pipe.step(*batches(2)[1])
        with pytest.raises(WorkerError, match="these workers are closed"):
            pipe.step(*batches(2)[1])


def test_forwards_begin_again_after_a_second_loss(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(CASES["1f1b-spare"], crews(("numpy:cpu:0",) * 4, "shared-memory")) as pipe:
        expected = [pipe.predict(x) for x, _ in batches(5)]
        (victim,) = pipe._crew.call(["m1"], "engine_backends:pid")
        outputs = pipe.predict_batches(x for x, _ in batches(5))
        found = [next(outputs)]
        begin = Forwards.begin

        def kill_at_begin(self: Forwards) -> None:
            monkeypatch.undo()
            begin(self)
            kill(pipe, "m0")
            assert eventually(lambda: pipe._crew._control.failed)

        monkeypatch.setattr(Forwards, "begin", kill_at_begin)
        os.kill(victim, signal.SIGKILL)
        found += outputs
        assert [lost.members for lost in pipe.lost] == [("m1", "m0")]
        assert not difference(found, expected, exact=False)


def test_two_interrupts_during_a_recovery_leave_no_process(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    def interrupt(*args: Any) -> Any:
        crew = pipe._training.setup.crew
        started.extend(crew.call([*crew.infos], "engine_backends:pid"))
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(survivors, "plan_for", interrupt)
    with opened(CASES["1f1b-steps"], crews(DEVICES, "shared-memory")) as pipe:
        kill(pipe, "m1")
        with pytest.raises(KeyboardInterrupt):
            pipe.step(*batches(1)[0])
        assert len(started) == 2
        assert eventually(lambda: all(map(has_ended, started)))


def test_errors_at_different_batches_of_an_evaluation_are_survived(crews: Crews) -> None:
    """Every worker raises an error once it has computed some batches."""

    def arm(crew: Crew) -> None:
        crew.begin_each("breaking:arm", dict.fromkeys(crew.cluster.ids, ("raise", 60)))

    crew = crews(("numpy:cpu:0",) * 4, "shared-memory")
    data = [x for x, _ in batches(5)] * 5
    with opened(CASES["1f1b-spare"], crew) as pipe:
        expected = [pipe.predict(x) for x in data]
    with starting(arm), opened(CASES["1f1b-spare"], crew) as pipe:
        arm(crew)
        found = [*pipe.predict_batches(data)]
        assert len(pipe.lost) >= 3
        assert not difference(found, expected, exact=False)


def test_an_error_that_every_device_raises_ends_a_training(crews: Crews) -> None:
    def arm(crew: Crew) -> None:
        crew.begin_each("breaking:arm", dict.fromkeys(crew.cluster.ids, ("raise", 9)))

    crew = crews(("numpy:cpu:0",) * 4, "shared-memory")
    with starting(arm), opened(CASES["1f1b-spare"], crew) as pipe:
        arm(crew)
        with pytest.raises(WorkerError, match="error 3 at the same mini-batch"):
            pipe.step(*batches(1)[0])
