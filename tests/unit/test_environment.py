"""Values of environment variables, and paths in a cluster file's options, follow the same rules."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hetpipe.backends.native import NativeBackend
from hetpipe.backends.opencl import OpenCLBackend

from hetpipe import environment
from hetpipe.caches import CacheWarning, cache_folder, optional_folder
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.papers.reproduced.table import reproduce

NOBODY = "~nobody-of-that-name/x"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("HETPIPE_CACHE", lambda: cache_folder("costs")),
        ("HETPIPE_DATA", lambda: reproduce("pipedream")),
        ("HETPIPE_NATIVE", lambda: NativeBackend().discover()),
    ],
)
def test_a_path_without_a_home_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, read: Callable[[], object]
) -> None:
    monkeypatch.setenv(name, NOBODY)
    with pytest.raises(HetpipeError, match=f"variable {name}: .*home folder ~nobody-of-that-name"):
        read()


def test_paths_begin_in_the_home_folder(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv("HETPIPE_NATIVE", "~/a.so:b.so")
    assert environment.paths("HETPIPE_NATIVE") == [home / "a.so", Path("b.so")]
    monkeypatch.setenv("HETPIPE_DATA", "")
    assert environment.path("HETPIPE_DATA") is None


def test_training_continues_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETPIPE_CACHE", NOBODY)
    monkeypatch.setenv("HETPIPE_WARNED_CACHE", "")
    with pytest.warns(CacheWarning, match=r"variable HETPIPE_CACHE: .* nothing is kept"):
        assert optional_folder("costs") is None


def test_the_clock_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HETPIPE_CLOCK", raising=False)
    assert environment.clock() is time.perf_counter
    monkeypatch.setenv("HETPIPE_CLOCK", "process")
    assert environment.clock() is time.process_time
    monkeypatch.setenv("HETPIPE_CLOCK", "cpu")
    with pytest.raises(HetpipeError, match="HETPIPE_CLOCK is 'cpu'; write HETPIPE_CLOCK=process"):
        environment.clock()


def test_options_of_a_cluster_file_name_paths_from_home(home: Path) -> None:
    backend = OpenCLBackend()
    backend.configure({"bundles": "~/built"}, Path("/elsewhere"))
    assert backend._bundles == home / "built"
    backend.configure({"bundles": "built"}, Path("/elsewhere"))
    assert backend._bundles == Path("/elsewhere/built")
    with pytest.raises(BackendError, match=f"^{home}/mine.toml: cannot be read"):
        backend.configure({"kernels": ["~/mine.toml"]}, Path("/elsewhere"))


@pytest.mark.parametrize("text", [NOBODY, "a\0b"])
def test_options_with_invalid_paths_are_refused(text: str) -> None:
    for backend, options in (
        (OpenCLBackend(), {"bundles": text}),
        (OpenCLBackend(), {"kernels": [text]}),
        (NativeBackend(), {"libraries": [text]}),
    ):
        with pytest.raises(BackendError, match=r"no file can have|home folder ~nobody"):
            backend.configure(options, Path("/elsewhere"))
