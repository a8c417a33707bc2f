"""Options of backends: from the table of a cluster file to `Backend.configure`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hetpipe.backends.numpy import NumpyBackend

from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.errors import BackendError, ClusterError
from hetpipe.sdk.host import registry
from hetpipe.sdk.host.registry import configure_backend, register_backend
from hetpipe.sdk.info import DeviceInfo

FILE = """
transport = "{transport}"

[backend.optional]
count = {count}

[[device]]
device = "optional:cpu:1"
"""


class Optional(NumpyBackend):
    """A backend with as many devices as its options say."""

    name = "optional"

    def __init__(self) -> None:
        self.taken: list[tuple[Mapping[str, Any], Path]] = []

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        if options.keys() != {"count"}:
            raise BackendError(f"the options are count, not {', '.join(options)}")
        self.taken.append((options, folder))

    def discover(self) -> list[DeviceInfo]:
        (info,) = super().discover()
        count = self.taken[-1][0]["count"] if self.taken else 0
        ids = [f"optional:cpu:{number}" for number in range(count)]
        return [replace(info, id=device_id, backend="optional") for device_id in ids]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_registered", "_instances", "_options"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    register_backend(Optional)


def load(folder: Path, text: str) -> Cluster:
    (folder / "cluster.toml").write_text(text)
    return Cluster.load(folder / "cluster.toml")


def received_options() -> list[tuple[Mapping[str, Any], Path]]:
    backend = registry.get_backend("optional")
    assert isinstance(backend, Optional)
    return backend.taken


@pytest.mark.parametrize("transport", ["local", "shared-memory"])
def test_options_reach_the_controller_and_every_worker(tmp_path: Path, transport: str) -> None:
    """A worker without the options would not find the device."""
    cluster = load(tmp_path, FILE.format(transport=transport, count=2))
    with Crew.start(cluster):
        assert received_options() == [({"count": 2}, tmp_path)]


def test_the_same_options_are_given_once_and_others_replace_them(tmp_path: Path) -> None:
    for count in (1, 1, 2):
        configure_backend("optional", {"count": count}, tmp_path)
    assert received_options() == [({"count": 1}, tmp_path), ({"count": 2}, tmp_path)]


def test_refused_options_are_an_error_with_their_line(tmp_path: Path) -> None:
    text = FILE.format(transport="local", count=2).replace("count", "size")
    with pytest.raises(BackendError, match=r"cluster.toml:4: the options are count, not size"):
        Crew.start(load(tmp_path, text))


def test_a_backend_without_configure_refuses_options(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="backend 'numpy' takes no options; it got fast"):
        configure_backend("numpy", {"fast": True}, tmp_path)


def test_options_of_a_backend_without_devices_are_refused(tmp_path: Path) -> None:
    text = FILE.format(transport="local", count=2).replace("[backend.optional]", "[backend.other]")
    message = r"cluster.toml:4: backend.other has options, but no device is of that backend; known"
    with pytest.raises(ClusterError, match=message):
        load(tmp_path, text)


def test_options_must_be_a_table(tmp_path: Path) -> None:
    text = "backend = 3\n" + FILE.partition("[backend.optional]\ncount = {count}\n")[2]
    with pytest.raises(ClusterError, match="write the options of each as a table"):
        load(tmp_path, text)
