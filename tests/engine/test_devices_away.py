"""Devices that cannot be found or opened after a loss are lost as well, however many they are."""

from __future__ import annotations

from collections.abc import Iterator
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
from hetpipe.pipeline import survivors
from hetpipe.plan.plan import Plan
from hetpipe.sdk.host.registry import register_backend


def test_devices_that_refuse_to_open_are_lost(tmp_path: Path) -> None:
    register_backend(FaultyBackend)
    devices = ["numpy:cpu:0", *["faulty:away:0"] * 3, "numpy:cpu:0"]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    options = {"faulty": BackendOptions({"away": "file"}, tmp_path)}
    cluster = Cluster(members, transport="shared-memory", options=options)
    with Crew.start(cluster) as crew, opened(crew, members="012") as pipe:
        pipe.step(*batches(1)[0])
        (tmp_path / "file").touch()
        kill(crew, "m0")
        pipe.step(*batches(1)[0])
        assert sorted(pipe.lost[0].members) == ["m0", "m1", "m2", "m3"]
        assert pipe.plan.all_devices == ("m4",)


def test_a_training_ends_if_no_lost_device_opens_again(tmp_path: Path) -> None:
    register_backend(FaultyBackend)
    members = tuple(Member(f"m{n}", "faulty:away:0") for n in range(2))
    options = {"faulty": BackendOptions({"away": "file"}, tmp_path)}
    cluster = Cluster(members, transport="shared-memory", options=options)
    with Crew.start(cluster) as crew, opened(crew, members="01") as pipe:
        pipe.step(*batches(1)[0])
        (tmp_path / "file").touch()
        kill(crew, "m0")
        with pytest.raises(WorkerError, match=r"the driver is away.*no device is left"):
            pipe.step(*batches(1)[0])


@pytest.fixture
def mixed(tmp_path: Path) -> Iterator[Crew]:
    register_backend(FaultyBackend)
    devices = ["numpy:cpu:0", "faulty:good:0", "numpy:cpu:0"]
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    options = {"faulty": BackendOptions({"away": "file"}, tmp_path)}
    with Crew.start(Cluster(members, transport="shared-memory", options=options)) as crew:
        yield crew


def test_devices_that_are_not_found_are_lost(mixed: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        monkeypatch.setattr(FaultyBackend, "discover", lambda self: [])
        kill(mixed, "m0")
        pipe.step(*batches(1)[0])
        assert sorted(pipe.lost[0].members) == ["m0", "m1"]
        assert pipe.plan.all_devices == ("m2",)


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


def learn(pipe: hp.Pipeline, **factors: float) -> None:
    """Let a pipeline have learned how many times slower than its profile each member is."""
    learning = pipe._rebalancer._learning
    assert learning is not None
    learning._factors |= factors
    learning._learned = None


def test_recovery_plans_by_the_learned_speeds(mixed: Crew) -> None:
    with opened(mixed, members="012") as pipe:
        pipe.step(*batches(1)[0])
        learn(pipe, m0=1.0, m1=50.0, m2=1.0)
        kill(mixed, "m2")
        pipe.step(*batches(1)[0])
        assert pipe.plan.all_devices == ("m0",)


@pytest.mark.parametrize(("slow", "joins"), [(1.0, True), (50.0, False)])
def test_a_device_joins_only_if_its_learned_speed_helps(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch, slow: float, joins: bool
) -> None:
    with opened(mixed, members="012") as pipe:
        learn(pipe, m0=2.0, m1=2.0 * slow, m2=2.0)
        returned(pipe, monkeypatch)
        pipe.step(*batches(1)[0])
        assert [event.members for event in pipe.joined] == [("m1",)] * joins
        assert ("m1" in pipe.plan.all_devices) == joins


def test_a_device_that_no_longer_fits_does_not_join(
    mixed: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have taken its memory meanwhile."""
    check = survivors.check_fit

    def check_fit(plan: Plan, *args: Any) -> None:
        if "m1" in plan.all_devices:
            raise HetpipeError("m1 lacks 7 bytes")
        check(plan, *args)

    with opened(mixed, members="012") as pipe:
        returned(pipe, monkeypatch)
        monkeypatch.setattr(survivors, "check_fit", check_fit)
        pipe.step(*batches(1)[0])
        assert len(pipe.lost) == 1
        assert not pipe.joined
        assert sorted(pipe.plan.all_devices) == ["m0", "m2"]
        assert pipe._survival is not None
        assert "m1" in pipe._survival.absent._due_s  # another look follows
