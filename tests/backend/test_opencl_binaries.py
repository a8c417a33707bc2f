"""Programs of a runtime without a cache are stored for the next process, and damage is detected."""

from __future__ import annotations

from pathlib import Path

import found_devices
import numpy as np
import pytest
import torch
from found_devices import infos
from hetpipe.backends.opencl.run import programs as binaries
from hetpipe.backends.opencl.run.programs import Programs
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.caches import CacheWarning
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.info import DeviceInfo

KEPT = [info for info in infos() if info.id.startswith("opencl:intel")]
OTHERS = [info for info in infos() if info.id.startswith("opencl:pocl")]
GRAPH = canonical(make_fx(lambda x: (torch.tanh(x) * 0.3125,))(torch.zeros(5, 7)))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels that were compiled from source."""
    names: list[str] = []
    usual = Programs._compile

    def counting(self: Programs, source: str, options: tuple[str, ...], name: str) -> object:
        names.append(name)
        return usual(self, source, options, name)

    monkeypatch.setattr(Programs, "_compile", counting)
    return names


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(binaries, "BINARIES", binaries.Entries("programs", "bin", most=2))
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    return tmp_path / "programs"


def run(info: DeviceInfo) -> None:
    """Open a new device, compile the graph and check its result."""
    device = get_backend("opencl").open(info)
    try:
        values = np.linspace(-2, 2, 35, dtype=np.float32).reshape(5, 7)
        (result,) = found_devices.run(device, GRAPH, [values])
    finally:
        device.close()
    np.testing.assert_allclose(result, np.tanh(values) * 0.3125, rtol=1e-5)


@pytest.mark.parametrize("info", KEPT, ids=lambda info: info.id)
def test_a_second_device_compiles_nothing(
    info: DeviceInfo, compiled: list[str], folder: Path
) -> None:
    run(info)
    assert len(compiled) == 1
    run(info)
    assert len(compiled) == 1
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("info", OTHERS, ids=lambda info: info.id)
def test_nothing_is_stored_for_a_runtime_with_a_cache(info: DeviceInfo, folder: Path) -> None:
    run(info)
    assert not folder.exists()


@pytest.mark.parametrize("info", KEPT, ids=lambda info: info.id)
@pytest.mark.parametrize("damage", ["flipped", "cut", "foreign"])
def test_a_damaged_program_is_compiled_again(
    info: DeviceInfo, compiled: list[str], folder: Path, damage: str
) -> None:
    """With `foreign`, the file is complete, but its content is no program of this runtime."""
    run(info)
    (path,) = folder.iterdir()
    data = bytearray(path.read_bytes())
    if damage == "foreign":
        binaries.BINARIES.store(path.stem, b"a program of another runtime")
    else:
        data[-100] ^= 1
        path.write_bytes(data if damage == "flipped" else data[:-100])
    with pytest.warns(CacheWarning, match="is not used and will be made again"):
        run(info)
    assert len(compiled) == 2
    run(info)
    assert len(compiled) == 2


@pytest.mark.parametrize("info", KEPT[:1], ids=lambda info: info.id)
def test_a_program_depends_on_driver_and_processor(
    info: DeviceInfo, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(info)
    monkeypatch.setattr(binaries, "target_arch", lambda: "another")
    run(info)
    monkeypatch.setattr(binaries, "cpu_flags", lambda: frozenset({"sse2"}))
    run(info)
    assert len(compiled) == 3


def test_the_oldest_programs_are_removed(folder: Path) -> None:
    for n in range(4):
        binaries.BINARIES.store(f"key{n}", bytes(n))
    assert len(list(folder.iterdir())) == 2
