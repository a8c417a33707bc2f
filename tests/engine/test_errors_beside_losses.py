"""Errors that are no loss of a device end a call of a training that survives losses, not the
training."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from broken_cases import CASES, Batch, batches, opened, starting
from crews import Crews, eventually, has_ended

import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, NotFiniteError, WorkerError
from hetpipe.pipeline import survivors

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


def test_an_error_that_every_device_raises_ends_a_training(crews: Crews) -> None:
    def arm(crew: Crew) -> None:
        crew.begin_each("breaking:arm", dict.fromkeys(crew.cluster.ids, ("raise", 9)))

    crew = crews(("numpy:cpu:0",) * 4, "shared-memory")
    with starting(arm), opened(CASES["1f1b-spare"], crew) as pipe:
        arm(crew)
        with pytest.raises(WorkerError, match="error 3 at the same mini-batch"):
            pipe.step(*batches(1)[0])
