"""Which kernels a device gets, and who may choose them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hetpipe.backends.opencl import OpenCLBackend
from hetpipe.backends.opencl.platform.families import VARIABLE, choice, default_family

from hetpipe.errors import BackendError
from hetpipe.sdk.info import Capabilities, DeviceInfo


def device(kind: str, emulated: bool = False) -> DeviceInfo:
    capabilities = Capabilities(emulated=emulated)
    return DeviceInfo(
        "opencl:x:0", "opencl", kind, "x", "x", "x", 1, "host", capabilities=capabilities
    )


@pytest.mark.parametrize(
    ("info", "family"),
    [
        (device("cpu"), "cpu"),
        (device("gpu"), "gpu"),
        (device("other"), "cpu"),
        (device("fpga"), "fpga"),
        (device("fpga", emulated=True), "cpu"),  # the emulator computes on the host's cores
    ],
)
def test_the_default_family_follows_the_kind_of_hardware(info: DeviceInfo, family: str) -> None:
    assert default_family(info) == family


def test_the_last_matching_pattern_wins_and_the_environment_comes_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"opencl:*": "gpu", "opencl:pocl:*": "cpu"}
    chosen = choice(options)
    assert [chosen.of(f"opencl:{name}:0") for name in ("pocl", "intel-cpu")] == ["cpu", "gpu"]
    assert choice({}).of("opencl:pocl:0") == ""
    monkeypatch.setenv(VARIABLE, "opencl:pocl:0 = fpga")
    chosen = choice(options)
    assert [chosen.of(f"opencl:{name}:0") for name in ("pocl", "intel-cpu")] == ["fpga", "gpu"]
    monkeypatch.setenv(VARIABLE, "cpu")
    assert choice(options).of("opencl:intel-cpu:0") == "cpu"
    monkeypatch.setenv(VARIABLE, "opencl:pocl:0 = cpu")
    assert choice({"opencl:pocl:0": "gpu", "*": "fpga"}).of("opencl:pocl:0") == "cpu"


def test_an_invalid_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackendError, match=r"families.*'cpu', 'gpu' or 'fpga'"):
        OpenCLBackend().configure({"families": {"opencl:pocl:0": "asic"}}, Path())
    with pytest.raises(
        BackendError, match="opencl:card:0', but no device matches it; the devices are a"
    ):
        choice({"opencl:card:0": "fpga"}).check(["a", "b"])
    monkeypatch.setenv(VARIABLE, "opencl:*=asic")
    with pytest.raises(BackendError, match="no family 'asic'; there are cpu, gpu, fpga"):
        choice({})
