"""Self-tests run in a separate process; a device of another package joins a cluster after it
passes."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hetpipe.backends.numpy import NumpyBackend, NumpyDevice

from hetpipe.check import selftest_process as tested
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.local import DeviceWarning
from hetpipe.conformance import run
from hetpipe.conformance.check import Level
from hetpipe.errors import HetpipeError
from hetpipe.sdk.host import registry
from hetpipe.sdk.info import Capabilities, DeviceInfo


class Theirs(NumpyBackend):
    """A backend that looks like another package's accelerator."""

    name = "theirs"

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(
                info, id=f"{self.name}:unit:0", backend=self.name, kind="npu",
                memory_domain=f"{self.name}:unit:0", capabilities=Capabilities(),
            )
            for info in super().discover()
        ]  # fmt: skip


class Crashing(Theirs):
    name = "crashing"

    def open(self, info: DeviceInfo) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)


class Hanging(Theirs):
    name = "hanging"

    def open(self, info: DeviceInfo) -> Any:
        signal.pause() if sys.platform != "win32" else None


class _EndlessDevice(NumpyDevice):
    def _run(self, *args: Any) -> Any:
        signal.pause()


class Endless(Theirs):
    """A backend whose device never returns from `run`."""

    name = "endless"

    def open(self, info: DeviceInfo) -> Any:
        return _EndlessDevice(info)


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    monkeypatch.setattr(registry, "entry_points", lambda group: [])
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)


class Unknown(Theirs):
    """A backend whose device has an untested runtime, which crashes."""

    name = "unknown"

    def discover(self) -> list[DeviceInfo]:
        return [
            replace(info, capabilities=Capabilities(untried=True)) for info in super().discover()
        ]

    def open(self, info: DeviceInfo) -> Any:
        os.abort()


@pytest.mark.slow
def test_a_device_of_an_unknown_runtime_is_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_backend(Unknown)
    registry.register_backend(Theirs)
    provider = registry.provider_of("unknown")
    monkeypatch.setattr(tested, "provider_of", lambda name: replace(provider, package="hetpipe"))
    with pytest.warns(DeviceWarning, match=r"unknown:unit:0 stays out .* signal 6"):
        (member,) = Cluster.local().members
    assert member.device == "theirs:unit:0"


@pytest.mark.parametrize("text", ["abc", "0", "-3", "inf", "nan"])
def test_a_wrong_time_limit_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    registry.register_backend(Theirs)
    monkeypatch.setenv("HETPIPE_SELFTEST_LIMIT_S", text)
    infos, _ = registry.discover_devices()
    why = f"HETPIPE_SELFTEST_LIMIT_S is '{text}'; write a number of seconds above 0, such as"
    with pytest.raises(HetpipeError, match=why):
        list(tested.run_selftests(infos))


@pytest.mark.slow
def test_crashes_and_hangs_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in (Crashing, Endless, Hanging, Theirs):
        registry.register_backend(backend)
    monkeypatch.setenv("HETPIPE_SELFTEST_LIMIT_S", "5")
    infos, failures = registry.discover_devices()
    assert not failures
    results = dict(tested.run_selftests(infos))
    assert list(results) == [
        f"{name}:unit:0" for name in ("crashing", "endless", "hanging", "theirs")
    ]
    assert "in the middle of the test, with signal 11" in results["crashing:unit:0"]["message"]
    here = f"\\({__file__}:[0-9]+\\)"
    for name, function in {"endless": "_run", "hanging": "open"}.items():
        message = results[f"{name}:unit:0"]["message"]
        assert re.fullmatch(f"did not end within 5 s: it hangs in {function} {here}", message)
    assert results["theirs:unit:0"]["ok"]


@pytest.mark.slow
def test_conformance_names_a_hang_and_does_not_wait_for_each_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry.register_backend(Endless)
    monkeypatch.setattr(run, "MOST_HANGS", 1)
    (info,) = registry.devices_of("endless")
    first, *others = run.run_suite(info, Level.CORE, 5.0, groups=("strides",))
    assert first.outcome == "crashed"
    here = f"\\({__file__}:[0-9]+\\)"
    assert re.fullmatch(f"has not ended after 5 s: it hangs in _run {here}", first.message)
    assert len(others) == len(run.checks_of(Level.CORE, ("strides",))) - 1
    assert {each.outcome for each in others} == {"skipped"}
    assert "1 checks have already hung" in others[0].message


@pytest.mark.slow
def test_a_device_joins_after_it_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.register_backend(Theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (member,) = Cluster.local().members
    assert member.device == "theirs:unit:0"
    monkeypatch.setattr(tested, "run_selftests", lambda infos: pytest.fail("tested again"))
    assert Cluster.local().members == (member,)


@pytest.mark.slow
def test_a_failing_device_joins_only_if_it_is_named() -> None:
    registry.register_backend(Theirs)
    registry.register_backend(Crashing)
    with pytest.warns(DeviceWarning, match=r"crashing:unit:0 stays out .* signal 11"):
        (member,) = Cluster.local().members
    assert member.device == "theirs:unit:0"
    (named,) = Cluster.local(devices=["crashing:unit:0"]).members
    assert named.device == "crashing:unit:0"
