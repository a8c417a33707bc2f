"""Devices that cannot be found or opened after a loss are lost as well, however many they are."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_backends import FaultyBackend
from hetpipe.backends.numpy import NumpyBackend
from test_lost_devices import batches, kill, opened

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import BackendOptions, Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.pipeline import survival, survivors
from hetpipe.pipeline.stages import Stages
from hetpipe.plan.plan import Plan
from hetpipe.sdk.host import registry
from hetpipe.sdk.host.registry import register_backend


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the backends and options of a test afterwards."""
    for name in ("_registered", "_instances", "_options", "_known", "_silent"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def crew_of(devices: Sequence[str], folder: Path) -> Crew:
    """Start a crew whose devices `faulty:away:0` open unless `folder` has a file `file`."""
    register_backend(FaultyBackend)
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    options = {"faulty": BackendOptions({"away": "file"}, folder)}
    return Crew.start(Cluster(members, transport="shared-memory", options=options))


def test_devices_that_refuse_to_open_are_lost(tmp_path: Path) -> None:
    devices = ["numpy:cpu:0", *["faulty:away:0"] * 3, "numpy:cpu:0"]
    with crew_of(devices, tmp_path) as crew, opened(crew, members="012") as pipe:
        pipe.step(*batches(1)[0])
        (tmp_path / "file").touch()
        kill(crew, "m0")
        pipe.step(*batches(1)[0])
        assert sorted(pipe.lost[0].members) == ["m0", "m1", "m2", "m3"]
        assert pipe.plan.all_devices == ("m4",)


def test_a_training_ends_if_no_lost_device_opens_again(tmp_path: Path) -> None:
    with crew_of(["faulty:away:0"] * 2, tmp_path) as crew, opened(crew, members="01") as pipe:
        pipe.step(*batches(1)[0])
        (tmp_path / "file").touch()
        kill(crew, "m0")
        with pytest.raises(WorkerError, match=r"the driver is away.*no device is left"):
            pipe.step(*batches(1)[0])


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Crew]:
    with crew_of(["numpy:cpu:0", "faulty:good:0", "numpy:cpu:0"], tmp_path) as crew:
        yield crew


def test_devices_that_are_not_found_are_lost(mixed: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        kill(mixed, "m0")
        pipe.step(*batches(1)[0])
        assert sorted(pipe.lost[0].members) == ["m0", "m1"]
        assert pipe.plan.all_devices == ("m2",)


def test_a_backend_that_hangs_takes_no_device_that_it_has_found(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover_limit_s", 0.05)
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: time.sleep(2))
        kill(mixed, "m0")
        pipe.step(*batches(1)[0])
        assert [lost.members for lost in pipe.lost] == [("m0",)]


def test_a_device_that_is_not_found_once_is_sought_again(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    discover, answers = FaultyBackend.discover, iter([False])

    def found(self: FaultyBackend) -> Any:
        return discover(self) if next(answers, True) else []

    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover", found)
        kill(mixed, "m0")
        pipe.step(*batches(1)[0])
        assert [lost.members for lost in pipe.lost] == [("m0",)]


def test_a_training_ends_if_no_device_is_found(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        monkeypatch.setattr(NumpyBackend, "discover", lambda self: [])
        kill(mixed, "m1")
        with pytest.raises(WorkerError, match=r"member 'm0': no device.*no device is left"):
            pipe.step(*batches(1)[0])


def test_a_last_resort_leaves_out_a_device_that_is_not_found(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        for member in ("m1", "m0", "m2"):
            kill(pipe._crew, member)
            pipe.step(*batches(1)[0])
        assert [lost.members for lost in pipe.lost] == [("m1",), ("m0",), ("m2", "m1")]
        assert sorted(pipe.plan.all_devices) == ["m0", "m2"]


def test_members_that_are_back_stay_if_another_one_is_not_found(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(mixed, members="012") as pipe:
        for member in ("m1", "m2"):
            pipe.step(*batches(1)[0])
            kill(pipe._crew, member)
        pipe.step(*batches(1)[0])
        assert pipe._survival is not None
        absent = pipe._survival.absent
        absent._due_s.clear()
        absent._back |= {"m1", "m2"}
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        kill(pipe._crew, "m0")
        pipe.step(*batches(1)[0])
        assert pipe.lost[-1].members == ("m0", "m1")
        assert pipe._crew.cluster.ids == ("m2",)
        assert absent._due_s.keys() == {"m0", "m1"}  # each is looked for


def returned(pipe: hp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose m1, and find it back."""
    pipe.step(*batches(1)[0])
    kill(pipe._crew, "m1")
    pipe.step(*batches(1)[0])
    assert pipe._survival is not None
    absent = pipe._survival.absent
    absent._due_s.clear()
    absent._back.add("m1")
    monkeypatch.setattr(absent, "look", lambda present: "m1" in absent.back)


def test_a_device_that_is_not_found_when_it_joins_is_lost_again(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training continues with the members that it had."""
    with opened(mixed, members="012") as pipe:
        returned(pipe, monkeypatch)
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        pipe.step(*batches(1)[0])
        assert [lost.members for lost in pipe.lost] == [("m1",), ("m1",)]
        assert not pipe.joined
        assert sorted(pipe.plan.all_devices) == ["m0", "m2"]


@pytest.mark.parametrize("late", [False, True])
def test_a_device_that_no_longer_fits_does_not_join(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Another process may have taken its memory meanwhile; or it refuses to load a stage."""
    check, load = survivors.check_fit, Stages.load

    def check_fit(plan: Plan, *args: Any) -> None:
        if "m1" in plan.all_devices and not late:
            raise HetpipeError("m1 lacks 7 bytes")
        check(plan, *args)

    def load_unless(stages: Stages, *args: Any) -> None:
        if "m1" in stages.plan.all_devices:
            raise HetpipeError("m1 lacks aten.relu")
        load(stages, *args)

    presents: list[Plan] = []

    def noted(setup: Any, before: Plan, present: Plan, sizes: Any) -> Any:
        presents.append(present)
        return survivors.checked_plan(setup, before, present, sizes)

    with opened(mixed, members="012") as pipe:
        returned(pipe, monkeypatch)
        monkeypatch.setattr(survival, "checked_plan", noted)
        monkeypatch.setattr(survivors, "check_fit", check_fit)
        monkeypatch.setattr(Stages, "load", load_unless)
        pipe.step(*batches(1)[0])
        assert len(pipe.lost) == 1
        assert not pipe.joined
        assert [sorted(plan.all_devices) for plan in (*presents, pipe.plan)] == [["m0", "m2"]] * 3
        assert pipe._survival is not None
        assert "m1" in pipe._survival.absent._due_s  # another look follows
