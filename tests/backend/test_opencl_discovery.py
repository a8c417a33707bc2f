"""Discovery of runtimes: repairs, errors with a cure, and settings that are never overridden."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from found_devices import infos
from hetpipe.backends.opencl.lower.target import Target
from hetpipe.backends.opencl.platform import runtimes
from hetpipe.backends.opencl.platform.runtimes import runtime_of, slug

from hetpipe.sdk.host.registry import get_backend
from hetpipe.sdk.info import HOST_MEMORY, Capabilities, DeviceInfo

OPENCL = [info for info in infos() if info.backend == "opencl"]
DISCOVER = """
from hetpipe.backends.opencl import OpenCLBackend
from hetpipe.errors import BackendError
try:
    print(*(info.id for info in OpenCLBackend().discover()))
except BackendError as error:
    print("BackendError:", error)
"""


def python(code: str, **environment: str) -> str:
    """Return the output of a fresh process, which must succeed."""
    ours = [name for name in os.environ if name.startswith("HETPIPE_SET_")]
    mine = [name.removeprefix("HETPIPE_SET_") for name in ours]
    clean = {key: value for key, value in os.environ.items() if key not in (*ours, *mine)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_no_platform_is_an_error_with_a_cure() -> None:
    fake = "import pyopencl\npyopencl.get_platforms = lambda: []\n"
    said = python(fake + DISCOVER)
    assert said.startswith("BackendError: no OpenCL runtime is installed")
    assert "pip install 'hetpipe[emulators]'" in said
    assert "apt install pocl-opencl-icd" in said


def test_platforms_without_devices_are_an_error_with_a_cure() -> None:
    fake = """
import pyopencl
class Empty:
    name = "Hollow"
    def get_devices(self): return []
pyopencl.get_platforms = lambda: [Empty()]
"""
    said = python(fake + DISCOVER)
    assert said.startswith("BackendError: no OpenCL device")
    assert "pip install" in said


def test_a_missing_pyopencl_is_an_error_with_a_cure() -> None:
    said = python("import sys\nsys.modules['pyopencl'] = None\n" + DISCOVER)
    assert said.startswith("BackendError: pyopencl cannot be imported")
    assert "pip install pyopencl" in said


def test_the_users_vendor_folder_is_kept(tmp_path: Path) -> None:
    """With an empty folder, only pyopencl's own runtimes may appear, never PoCL or Intel's."""
    said = python(DISCOVER, OCL_ICD_VENDORS=str(tmp_path))
    assert said.startswith("BackendError") or all("oclgrind" in word for word in said.split())


def test_a_runtime_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    """The ICD loader skips the runtime silently."""
    (tmp_path / "gone.icd").write_text("/nowhere/libgone.so.1\n")
    code = """
from hetpipe.backends.opencl import OpenCLBackend
for finding in OpenCLBackend().describe():
    print(finding)
"""
    said = python(code, OCL_ICD_VENDORS=str(tmp_path))
    (line,) = (line for line in said.splitlines() if "gone.icd registers" in line)
    assert line.startswith("('missing', 'the runtime that ")
    assert "cannot be loaded: /nowhere/libgone.so.1: cannot open shared object file" in line
    assert f"or remove {tmp_path / 'gone.icd'}" in line


def test_the_file_to_remove_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cure named a file in /etc, even for a library that only hetpipe had registered."""
    system, ours = tmp_path / "vendors", tmp_path / "icd-0"
    of_pip, of_system = tmp_path / "libpip.so", system / "old.icd"
    for folder in (system, ours):
        folder.mkdir()
        (folder / "old.icd").write_text("/nowhere/libold.so\n")
    of_pip.write_text("no library")
    (ours / "libpip.so.icd").write_text(f"{of_pip}\n")
    monkeypatch.setattr(runtimes, "SYSTEM_VENDORS", system)
    for name in ("OCL_ICD_VENDORS", "HETPIPE_SET_OCL_ICD_VENDORS"):
        monkeypatch.setenv(name, str(ours))
    cures = [cure for _, _, cure in runtimes.unloadable()]
    start = "install the missing library, or remove"
    assert cures == [f"{start} {of_pip}", f"{start} {of_system}"]


def test_a_system_without_runtimes_registers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "SYSTEM_VENDORS", tmp_path / "absent")
    monkeypatch.delenv("OCL_ICD_VENDORS", raising=False)
    assert runtimes.unloadable() == []


def test_only_known_runtimes_get_prefetches() -> None:
    """Mesa's runtime crashes at a prefetch."""
    info = DeviceInfo("opencl:x:0", "opencl", "cpu", "x", "x", "x", 1, HOST_MEMORY)
    for untried in (False, True):
        there = replace(info, capabilities=Capabilities(untried=untried))
        target = Target(there, 1, 1, 1, 1, {})
        assert ("NO_PREFETCH" in target.defines) == untried


def test_the_users_settings_are_kept(tmp_path: Path) -> None:
    code = """
import os
from hetpipe.backends.opencl.platform.runtimes import prepare
prepare()
for name in ("OCL_ICD_VENDORS", "CL_CONFIG_CPU_TARGET_ARCH", "POCL_CACHE_DIR"):
    print(os.environ[name])
"""
    kept = {
        "OCL_ICD_VENDORS": str(tmp_path), "CL_CONFIG_CPU_TARGET_ARCH": "corei7",
        "POCL_CACHE_DIR": str(tmp_path / "cache"),
    }  # fmt: skip
    assert python(code, **kept).split() == list(kept.values())


def test_two_processes_never_share_a_kernel_cache() -> None:
    code = """
import os, subprocess, sys
from hetpipe.backends.opencl.platform.runtimes import prepare
prepare()
again = '''
import os
from hetpipe.backends.opencl.platform.runtimes import prepare
prepare()
print(os.environ["POCL_CACHE_DIR"])
'''
child = subprocess.run([sys.executable, "-c", again], capture_output=True, text=True, check=True)
print(os.environ["POCL_CACHE_DIR"], child.stdout.strip())
"""
    parent, child = python(code).splitlines()[-1].split()
    assert parent != child


def test_loading_the_backend_loads_no_driver() -> None:
    code = """
import sys
from hetpipe.backends.opencl import OpenCLBackend
OpenCLBackend()
print("pyopencl" in sys.modules, "torch" in sys.modules)
"""
    assert python(code) == "False False"


@pytest.mark.skipif(not OPENCL, reason="no OpenCL runtime: pip install 'hetpipe[emulators]'")
def test_descriptions_of_devices() -> None:
    assert len({info.id for info in OPENCL}) == len(OPENCL)
    for info in OPENCL:
        name = info.id.split(":")[1]
        assert info.memory_nbytes > 0
        if name in ("pocl", "intel-cpu"):
            assert (info.kind, info.memory_domain) == ("cpu", "host")
            assert not info.capabilities.emulated
        if name == "oclgrind":
            assert (info.kind, info.capabilities.reference) == ("cpu", True)
        if name == "intel-fpga-emulator":
            assert (info.kind, info.capabilities.emulated) == ("fpga", True)


@pytest.mark.skipif(not OPENCL, reason="no OpenCL runtime: pip install 'hetpipe[emulators]'")
def test_all_thread_pools_but_the_emulators_are_bounded() -> None:
    backend = get_backend("opencl")
    for info in OPENCL:
        bounds = backend.worker_environment(info, 3)
        assert set(bounds.values()) <= {"3"}
        assert bool(bounds) == (info.id.split(":")[1] in ("pocl", "intel-cpu"))


def test_describe_names_every_device_and_gives_cures() -> None:
    code = """
from hetpipe.backends.opencl import OpenCLBackend
for level, what, cure in OpenCLBackend().describe():
    assert level in ("ok", "repaired", "missing", "broken"), level
    assert cure or level in ("ok", "repaired"), what
    print(what)
"""
    said = python(code)
    assert all(f"{info.id}:" in said for info in OPENCL)


def test_slugs_and_runtimes_of_platform_names() -> None:
    assert slug("NVIDIA Corporation") == "nvidia"
    assert slug("Advanced Micro Devices, Inc.") == "advanced-micro"
    assert slug("Intel(R) Corporation") == "intel"
    assert slug("") == "unknown"
    graphics = runtime_of("Intel(R) OpenCL Graphics", is_cpu=False)
    assert graphics is None
    emulator = runtime_of("Intel(R) FPGA Emulation Platform for OpenCL(TM)", is_cpu=False)
    assert emulator is not None
    assert emulator.kind == "fpga"
