"""A blocking backend is disabled after its time limit, and one with an invalid description at
once."""

from __future__ import annotations

import threading
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest
from hetpipe.backends.numpy import NumpyBackend
from typer.testing import CliRunner

from hetpipe.cli.app import app
from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import BackendError
from hetpipe.sdk.host import registry
from hetpipe.sdk.info import Capabilities

GOOD = replace(NumpyBackend().discover()[0], id="bad:cpu:0", backend="bad")


class Blocking(NumpyBackend):
    name = "bad"
    discover_limit_s = open_limit_s = 0.05
    blocks = "discover"

    def __init__(self) -> None:
        self.asked = 0

    def _block(self, where: str) -> None:
        self.asked += 1
        if where == self.blocks:
            threading.Event().wait(5)

    def discover(self) -> Any:
        self._block("discover")
        return [GOOD]

    def open(self, info: Any) -> Any:
        self._block("open")
        return super().open(info)

    def describe(self) -> Any:
        self._block("describe")
        return [("ok", "all is well", "")]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    monkeypatch.setattr(registry, "_instances", {})
    monkeypatch.setattr(registry, "_silent", {})
    points = [EntryPoint("numpy", "hetpipe.backends.numpy:NumpyBackend", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)


def test_a_blocking_discovery_is_awaited_only_once() -> None:
    registry.register_backend(Blocking)
    for _ in range(3):
        infos, failures = registry.discover_devices()
        assert [info.id for info in infos] == ["numpy:cpu:0"]
        assert failures == {
            "bad": "backend 'bad' fails to find its devices: no answer after 0.05 s"
        }
    backend: Any = registry.get_backend("bad")
    assert backend.asked == 1


def test_a_blocking_open_is_reported() -> None:
    registry.register_backend(type("Bad", (Blocking,), {"blocks": "open"}))
    with pytest.raises(BackendError, match=r"to open bad:cpu:0: no answer after 0\.05 s"):
        registry.open_device("bad:cpu:0")


def test_a_blocking_description_is_reported() -> None:
    registry.register_backend(type("Bad", (Blocking,), {"blocks": "describe"}))
    result = CliRunner().invoke(app, ["doctor", "--no-selftest"])
    assert result.exit_code == 0, result.output
    assert "'bad' fails to describe itself: no answer after 0.05 s" in result.output
    named = CliRunner().invoke(app, ["doctor", "--no-selftest", "--backends", "bad"])
    assert named.exit_code == 1, named.output
    assert "backend bad" in str(named.exception)


def test_a_blocking_import_is_reported(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_plugin.py").write_text("import threading\nthreading.Event().wait(5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "LOAD_LIMIT_S", 0.05)
    points = [EntryPoint("bad", "slow_plugin:Backend", registry.GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(BackendError, match=r"slow_plugin:Backend: no answer after 0\.05 s"):
        registry.get_backend("bad")


def test_a_named_device_needs_no_other_backend() -> None:
    registry.register_backend(Blocking)
    Cluster.local(devices=["numpy:cpu:0"])
    assert "bad" not in registry._instances


INVALID = [
    (replace(GOOD, id="bad:cpu 0"), "must not contain blanks or #"),
    (replace(GOOD, id="bad:"), "ids are bad:name:index"),
    (replace(GOOD, kind="toaster"), "kind 'toaster'; the kinds are cpu, gpu, fpga, npu, other"),
    (replace(GOOD, memory_nbytes=0), "0 bytes of memory"),
    (replace(GOOD, memory_nbytes=True), "is bool True, not int"),
    (replace(GOOD, memory_domain=""), "no memory_domain"),
    (replace(GOOD, dtypes=("float32", "fp8")), "dtype 'fp8'"),
    (replace(GOOD, dtypes=("int64",)), "the dtypes int64; every device needs float32"),
    (replace(GOOD, cast_dtypes=("float32",)), "names float32 in dtypes and in cast_dtypes"),
    (replace(GOOD, capabilities=Capabilities(queues=0)), "0 queues; a device needs at least 1"),
    (replace(GOOD, capabilities=replace(GOOD.capabilities, chunks=1)), "chunks .* is int 1"),
]


@pytest.mark.parametrize(("info", "problem"), INVALID)
def test_an_invalid_description_is_refused(info: Any, problem: str) -> None:
    registry.register_backend(
        type("Bad", (NumpyBackend,), {"name": "bad", "discover": lambda _: [info]})
    )
    with pytest.raises(BackendError, match=problem) as raised:
        registry.devices_of("bad")
    assert str(raised.value).startswith("backend 'bad': ")


def test_a_duplicate_device_id_is_refused() -> None:
    registry.register_backend(
        type("Bad", (NumpyBackend,), {"name": "bad", "discover": lambda _: [GOOD, GOOD]})
    )
    with pytest.raises(BackendError, match="'bad:cpu:0' more than once"):
        registry.devices_of("bad")


def test_the_result_of_open_is_checked() -> None:
    fields = {"name": "bad", "discover": lambda _: [GOOD], "open": lambda *_: None}
    registry.register_backend(type("Bad", (NumpyBackend,), fields))
    with pytest.raises(BackendError, match="open returns None, not a Device"):
        registry.open_device("bad:cpu:0")


@pytest.mark.parametrize("name", ["", "Mine", "a:b", "a b", 7])
def test_an_invalid_name_is_refused(name: Any) -> None:
    with pytest.raises(BackendError, match="a name is a lower-case letter"):
        registry.register_backend(type("Bad", (NumpyBackend,), {"name": name}))


def test_two_backends_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        EntryPoint("mine", "one_package:Mine", registry.GROUP),
        EntryPoint("mine", "other_package:Mine", registry.GROUP),
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    with pytest.raises(BackendError, match="one_package:Mine, other_package:Mine; uninstall"):
        registry.get_backend("mine")


def test_a_registered_class_does_not_hide_an_installed_one() -> None:
    registry.register_backend(type("Mine", (NumpyBackend,), {}))
    with pytest.raises(BackendError, match="give one of them another name"):
        registry.get_backend("numpy")
