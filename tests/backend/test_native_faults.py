"""A faulty library is reported with its path and does not affect other libraries."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from found_devices import put, trace
from hetpipe.backends.native import LibraryWarning, NativeBackend
from hetpipe.backends.native.library import Handle
from native_libraries import example, faulty, open_library

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import core_decompositions
from hetpipe.sdk.host.registry import findings_of, open_device

ASKED = {
    "OTHER_VERSION": r"has version 7 of the interface, this hetpipe has version 1",
    "NO_VERSION": r"lacks version 1 of the interface",
    "NO_ENTRY": r"does not export hetpipe_backend_entry",
    "NO_RUN": r"lacks run in its table",
    "HALF_EVENTS": r"has only one of wait and release_event",
    "CRASH_AT_LOAD": r"crashes with signal 11 \(SIGSEGV\) while it is loaded",
    "ABORT_IN_COUNT": r"crashes with signal 6 \(SIGABRT\) while its devices are counted; it said: "
    r"libfaulty: assertion failed",
    "COUNT_FAILS": r"its devices cannot be counted: the driver is too old",
    "ENDLESS_COUNT": r"has 1000000 devices; a library may have at most 256",
    "HANG_IN_DESCRIBE": r"gives no answer within 3 s, while device 0 is described",
    "BAD_NAME": r"has the name 'My Card'; a name has small letters",
    "BAD_ID": r"has a device with 'my card:0' for its id",
    "BAD_KIND": r"is of kind 'xxxxxxxx'; the kinds are cpu",
    "NO_FLOAT32": r"has the dtypes int64; every device needs float32",
    "UNKNOWN_DTYPE": r"has unknown bits 0x80000000 for dtypes",
    "SAME_NAME": r"has the name 'example', as .*libexample.so has",
}
"""Expected errors of libraries that are faulty when asked for their devices."""


def backend_of(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> NativeBackend:
    monkeypatch.setenv("HETPIPE_NATIVE", os.pathsep.join(map(str, paths)))
    return NativeBackend()


@pytest.fixture(scope="module")
def asked() -> dict[str, str]:
    """Return the findings about all faulty libraries, by fault; all are asked at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_NATIVE_LIMIT_S", "3")
        backend = backend_of(patch, example(), *map(faulty, ASKED))
        broken = [text for level, text, _ in backend.describe() if level == "broken"]
        with pytest.warns(LibraryWarning):
            working = {info.id for info in backend.discover()}
    assert working == {"native:example.cpu:0", "native:example.cpu:1"}
    return {
        fault: text for fault in ASKED for text in broken if text.startswith(f"{faulty(fault)}")
    }


@pytest.mark.slow
@pytest.mark.parametrize("fault", ASKED)
def test_a_fault_disables_only_its_library(asked: dict[str, str], fault: str) -> None:
    assert re.search(ASKED[fault], asked[fault]), asked[fault]


def test_missing_files_and_files_that_are_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "text.so").write_text("no library")
    backend = backend_of(monkeypatch, tmp_path / "text.so", tmp_path / "absent.so")
    with pytest.raises(BackendError) as error:
        backend.discover()
    for name in ("text.so", "absent.so"):
        assert f"{tmp_path / name} cannot be loaded as a library: " in str(error.value)


def test_a_missing_device_is_explained_by_its_broken_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend_of(monkeypatch, example(), faulty("OTHER_VERSION"))
    with (
        pytest.warns(LibraryWarning),
        pytest.raises(BackendError, match=r"no device 'native:faulty.cpu:0'.* version 7"),
    ):
        open_device("native:faulty.cpu:0")
    assert any(level == "broken" for level, _, _ in findings_of("native"))


OPENED = {"OPEN_FAILS": "taken by process 7", "OPEN_GIVES_NULL": "open succeeds, and gives NULL"}


@pytest.mark.parametrize("fault", OPENED)
def test_a_device_that_cannot_be_opened_is_reported(fault: str) -> None:
    with pytest.raises(BackendError, match=OPENED[fault]):
        open_library(faulty(fault))


RUN = {
    "RUN_GIVES_NULL": "run succeeds, and an output is NULL",
    "RUN_RETURNS_AN_INPUT": "run returns input 0, which was not donated",
    "RUN_FAILS": "native:faulty.cpu:0: the bus is stuck",
    "RUN_INVENTS_A_CODE": "run returns 99, which the interface does not define",
}


@pytest.mark.parametrize("fault", RUN)
def test_a_run_with_wrong_results_is_refused(fault: str) -> None:
    device = open_library(faulty(fault))
    graph = trace(lambda x: (x + 1, x * 2), [torch.ones(3)], core_decompositions())
    buffer = put(device, np.ones(3, np.float32))
    with pytest.raises(BackendError, match=RUN[fault]):
        device.compile(graph).run([buffer])
    device.close()


def test_events_without_wait_functions_are_refused() -> None:
    device = open_library(faulty("EVENTS_UNTOLD"))
    with pytest.raises(BackendError, match="returns events but lacks the functions wait"):
        device.upload(np.ones(3, np.float32))


@pytest.mark.slow
def test_garbage_collection_ends_a_device_after_its_buffers() -> None:
    """Python finalizes the objects of one garbage collection in any order."""
    for _ in range(20):
        ended: list[str] = []
        device = Handle("device", ended.append, None)
        buffers = [Handle("buffer", ended.append, device) for _ in range(3)]
        circle: list[object] = [device, *buffers]
        circle.append(circle)
        del device, buffers, circle
        gc.collect()
        assert ended == ["buffer", "buffer", "buffer", "device"]


def test_a_wait_with_a_limit_ends_in_time() -> None:
    device = open_library(faulty("SLOW"))
    _, event = device.upload(np.ones(3, np.float32))
    assert not event.done()
    with pytest.raises(BackendError, match=r"native:faulty.cpu:0: not done after 0.3 s"):
        event.wait(0.3)
