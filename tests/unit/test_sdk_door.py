"""A device that breaks the contract is refused by name; a changed contract has a new version."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import inspect
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hetpipe.backends.native.library import architecture, mismatch
from hetpipe.backends.numpy import NumpyBackend, NumpyDevice
from torch import fx

from hetpipe.crew.fleet import _close
from hetpipe.errors import BackendError
from hetpipe.profile.probing import graph_of
from hetpipe.sdk import API_VERSION, backend, blocking, info, kernels
from hetpipe.sdk.backend import DONE, Device
from hetpipe.sdk.formats import bundle
from hetpipe.sdk.host.validation import check_ran, upload
from hetpipe.sdk.support import require_support
from hetpipe.wire.transport import to_device
from hetpipe.worker.blame import run_error

CONTRACTS = {2: "7b2e0b08c3dfff9c", 3: "91484ad081e0cb9b"}
"""Fingerprints of the contract, by version."""


@pytest.fixture
def device() -> NumpyDevice:
    (found,) = NumpyBackend().discover()
    return NumpyDevice(found)


@pytest.fixture
def graph() -> fx.GraphModule:
    return graph_of(torch.ops.aten.neg.default, 1, (3,))


RUNS: dict[str, tuple[Any, str]] = {
    "nothing": (None, r"returns None, not \(outputs, event, chunks\)"),
    "two values": (
        ([], DONE),
        r"returns \(\[\], <.*DoneEvent.*>\), not \(outputs, event, chunks\)",
    ),
    "no list": ((None, DONE, ()), "returns None, not a list of Buffer as outputs"),
    "too few results": (([], DONE, ()), "returns 0 outputs, not 1: one for each result"),
    "no buffer": (([7], DONE, ()), "returns 7 as output 0, not a Buffer"),
}


@pytest.mark.parametrize("fault", RUNS)
def test_a_wrong_result_of_run_is_refused(device: NumpyDevice, fault: str) -> None:
    ran, text = RUNS[fault]
    with pytest.raises(BackendError, match=f"backend 'numpy': run of device numpy:cpu:0 {text}"):
        check_ran(device, ran, 1)


def test_a_run_without_an_event_is_refused(device: NumpyDevice) -> None:
    buffer, _ = device.upload(np.zeros(3, np.float32))
    with pytest.raises(BackendError, match=r"run of .* returns None as its event, not an Event"):
        check_ran(device, ([buffer], None, ()), 1)


def test_a_correct_run_passes(device: NumpyDevice) -> None:
    buffer, event = upload(device, np.zeros(3, np.float32))
    assert check_ran(device, ([buffer], event, None), 1) == ([buffer], event, ())


@pytest.mark.parametrize("uploaded", [None, (None, DONE), (7,)])
def test_a_wrong_result_of_upload_is_refused(device: NumpyDevice, uploaded: Any) -> None:
    faulty = SimpleNamespace(info=device.info, upload=lambda array: uploaded)
    with pytest.raises(BackendError, match=r"upload of .* returns .*, not \(Buffer, Event\)"):
        upload(cast(Device, faulty), np.zeros(3, np.float32))
    with pytest.raises(BackendError, match=r"upload of .* returns .*, not \(Buffer, Event\)"):
        to_device(cast(Device, faulty), [np.zeros(3, np.float32)])


def test_the_error_also_names_the_operator(device: NumpyDevice, graph: fx.GraphModule) -> None:
    """The error at a stage's first graph names the operator, the method and both values."""
    device._run = lambda program, inputs, donate: []  # type: ignore[method-assign]
    inputs = [device.upload(np.zeros(3, np.float32))[0]]
    try:
        check_ran(device, device.compile(graph).run(inputs), 1)
    except BackendError as error:
        text = str(run_error(device, graph, inputs, (), error))
    assert "aten.neg.default" in text
    assert "run of device numpy:cpu:0 returns 0 outputs, not 1" in text


@pytest.mark.parametrize("answer", [True, False, 0])
def test_a_wrong_result_of_supports_is_refused(
    device: NumpyDevice, graph: fx.GraphModule, answer: Any
) -> None:
    device.supports = lambda node: answer  # type: ignore[method-assign]
    text = (
        f"supports of device numpy:cpu:0 returns {answer!r} for aten.neg.default; "
        "it must return None"
    )
    with pytest.raises(BackendError, match=text):
        require_support(device, graph)


def test_an_error_in_supports_is_reported(device: NumpyDevice, graph: fx.GraphModule) -> None:
    device.supports = lambda node: 1 // 0  # type: ignore[method-assign, return-value]
    with pytest.raises(BackendError, match=r"fails for aten\.neg\.default: ZeroDivisionError"):
        require_support(device, graph)


def test_an_error_in_close_is_logged(device: NumpyDevice, caplog: pytest.LogCaptureFixture) -> None:
    device.close = lambda: 1 // 0  # type: ignore[method-assign, assignment, return-value]
    with caplog.at_level(logging.WARNING, "hetpipe"):
        _close(device)
    assert "backend 'numpy' fails to close device numpy:cpu:0: ZeroDivisionError" in caplog.text


def test_a_library_for_another_architecture_is_named(tmp_path: Path) -> None:
    own = Path(sys.executable).resolve()
    assert mismatch(own) == ""
    header = bytearray(own.read_bytes()[:64])
    header[18:20] = (183 if header[18] != 183 else 62).to_bytes(2, sys.byteorder)
    path = tmp_path / "vendor.so"
    path.write_bytes(header)
    assert architecture(path) != architecture(own) != ""
    text = f"it is built for {architecture(path)}, this Python for {architecture(own)}: build"
    assert mismatch(path).startswith(text)


def test_a_changed_contract_has_a_new_version() -> None:
    assert API_VERSION in CONTRACTS, f"add the fingerprint of version {API_VERSION} to CONTRACTS"
    assert fingerprint() == CONTRACTS[API_VERSION], (
        "the contract of backends differs from the one that has version "
        f"{API_VERSION}: give it a new API_VERSION (hetpipe/sdk/info.py) "
        "with its reason, and add its fingerprint to CONTRACTS; or take the change back"
    )


def fingerprint() -> str:
    """Return a hash of all classes that the contract's modules define, and of the C header."""
    lines = [repr(info.KINDS), repr(info.DTYPE_NBYTES)]
    for module in (backend, blocking, bundle, info, kernels):
        for name, cls in sorted(vars(module).items()):
            if inspect.isclass(cls) and cls.__module__ == module.__name__ and name[0] != "_":
                lines += [name, *_members(cls)]
    native = sys.modules[mismatch.__module__].__file__
    assert native is not None
    header = (Path(native).parent / "hetpipe_backend.h").read_text("utf-8")
    header = " ".join(re.sub(r"/\*.*?\*/", "", header, flags=re.DOTALL).split())
    return hashlib.sha256("\n".join([*lines, header]).encode()).hexdigest()[:16]


def _members(cls: type) -> list[str]:
    """Return fields, values and signatures as texts, without an address."""
    if dataclasses.is_dataclass(cls):
        return [f"{each.name}: {each.type}{_default(each)}" for each in dataclasses.fields(cls)]
    if issubclass(cls, enum.Enum):
        return [f"{member.name} = {member.value}" for member in cls]
    hints = [f"{name}: {kind}" for name, kind in inspect.get_annotations(cls).items()]
    methods = {name: each for name, each in vars(cls).items() if inspect.isfunction(each)}
    return hints + [f"{name}{inspect.signature(each)}" for name, each in methods.items()]


def _default(field: dataclasses.Field[Any]) -> str:
    return "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
