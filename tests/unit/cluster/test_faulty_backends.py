"""A backend that raises or returns nonsense disables only itself, and says why."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hetpipe.backends.numpy import NumpyBackend
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError
from hetpipe.sdk.host import registry

(GOOD,) = NumpyBackend().discover()
BAD = replace(GOOD, id="bad:cpu:0", backend="bad")


class Raising(NumpyBackend):
    name = "bad"
    error: BaseException = KeyError("frequency")

    def discover(self) -> Any:
        raise self.error


class Returning(NumpyBackend):
    name = "bad"
    result: Any = None

    def discover(self) -> Any:
        return self.result


class Unmade(NumpyBackend):
    name = "bad"

    def __init__(self) -> None:
        raise ZeroDivisionError("no clock")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no backend except numpy's and, later, the bad one."""
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    points = [EntryPoint("numpy", "hetpipe.backends.numpy:NumpyBackend", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


CASES = [
    (Raising, {}, "KeyError: 'frequency'"),
    (Raising, {"error": SystemExit(3)}, "SystemExit: 3"),
    (Raising, {"error": AssertionError()}, "devices: AssertionError"),
    (Unmade, {}, "ZeroDivisionError: no clock"),
    (Returning, {"result": None}, "discover returns NoneType, not a list of DeviceInfo"),
    (Returning, {"result": [BAD, "gpu"]}, "contains str 'gpu', but it must"),
    (Returning, {"result": [replace(BAD, memory_nbytes="8 GB")]}, "memory_nbytes of device 'bad:"),
    (Returning, {"result": [replace(BAD, id=7)]}, "id of device 7 is int 7, not str"),
    (Returning, {"result": [GOOD]}, "device 'numpy:cpu:0' says that its backend is 'numpy'"),
]


@pytest.mark.parametrize(("cls", "fields", "reason"), CASES)
def test_only_the_bad_backend_is_disabled(
    cls: type[NumpyBackend], fields: Any, reason: str
) -> None:
    registry.register_backend(type("Bad", (cls,), fields))
    infos, failures = registry.discover_devices()
    assert [info.id for info in infos] == ["numpy:cpu:0"]
    assert reason in failures["bad"]
    assert failures["bad"].startswith("backend 'bad'")
    with pytest.raises(BackendError) as opened:
        registry.open_device("bad:cpu:0")
    assert reason in str(opened.value)
    with pytest.raises(BackendError) as named:
        Cluster.local(devices=["bad:cpu:0"])
    assert reason in str(named.value)
    for transport in ("local", "shared-memory"):
        with pytest.raises(BackendError) as started:
            Crew.start(Cluster((Member("m", "bad:cpu:0"),), transport=transport))
        assert reason in str(started.value)


@pytest.mark.parametrize("command", [["devices"], ["doctor", "--no-selftest"]])
@pytest.mark.parametrize(("cls", "fields", "reason"), [CASES[0], CASES[4]])
def test_commands_name_the_bad_backend(
    cls: type[NumpyBackend], fields: Any, reason: str, command: list[str]
) -> None:
    registry.register_backend(type("Bad", (cls,), fields))
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert reason in result.output
    assert "numpy:cpu:0" in result.output


def test_an_entry_point_that_raises_at_import(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_plugin.py").write_text("raise LookupError('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    points = [EntryPoint("bad", "bad_plugin:Backend", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    _, failures = registry.discover_devices()
    assert failures == {
        "bad": "backend 'bad' cannot be loaded from bad_plugin:Backend: LookupError: no licence"
    }


def test_an_interrupt_is_passed_on() -> None:
    registry.register_backend(type("Bad", (Raising,), {"error": KeyboardInterrupt()}))
    with pytest.raises(KeyboardInterrupt):
        registry.discover_devices()
