"""Well-known OpenCL runtimes, and repairs that make the runtimes of this machine visible.

OpenCL's loader does not find runtimes that pip installs: their registrations point to missing
paths, and their libraries' dependencies are on no search path. The repairs must happen before the
process first calls `clGetPlatformIDs`. They change no environment variable that the user has set.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hetpipe.caches import cache_folder, problem_of, warn_once
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.files import write_beside
from hetpipe.sdk.backend import Finding

SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")
INTEL = {
    "libintelocl.so": "Intel's OpenCL runtime for CPUs",
    "libintelocl_emu.so": "Intel's FPGA emulator",
}
DEPENDENCIES = (
    "libtbb.so.12", "libintlc.so.5", "libimf.so", "libirng.so", "libsvml.so",
    "libonnxruntime.1.12*.so", "libcommon_clang.so.2024*",
)  # fmt: skip
"""Dependencies of Intel's runtimes, in the order in which to load them."""
EMULATORS = "pip install 'hetpipe[emulators]'"
POCL = "apt install pocl-opencl-icd"
OURS = "HETPIPE_SET_"
"""Prefix of variables that tell a child which variables this module has set, not the user."""
SLOTS = 256
TARGET_ARCH = "CL_CONFIG_CPU_TARGET_ARCH"
BUNDLES = "HETPIPE_OPENCL_BUNDLES"
"""Environment variable with the folder of bundles; used if the cluster file names no folder."""


@dataclass(frozen=True)
class Runtime:
    """A well-known OpenCL runtime; `platform` is a part of its platform's name."""

    slug: str
    platform: str
    kind: str
    emulated: bool = False
    reference: bool = False
    threads: tuple[str, ...] = ()
    """Variables that bound its thread pool."""
    waiting: tuple[str, ...] = ()
    """Variables that make its thread pool large enough for kernels that wait for each other."""
    queues: int = 1
    """Number of queues whose kernels it runs at the same time."""
    streams: bool = False
    """Whether results leave the device while a pass runs, as on the emulated hardware."""
    drains: bool = False
    """Whether a wait for an event returns only when the event's whole queue is empty."""
    forgets: bool = False
    """Whether it loses all compiled programs when the process ends."""
    named_arch: bool = False
    """Whether it compiles for the processor that `target_arch` returns."""
    late: bool = False
    """Whether it compiles each kernel at the kernel's first launch, one kernel at a time."""


RUNTIMES = (
    Runtime(
        "pocl", "Portable Computing Language", "cpu", late=True,
        threads=("POCL_MAX_PTHREAD_COUNT", "POCL_CPU_MAX_CU_COUNT"),
    ),
    # The emulator's pool must not be bounded. Kernels joined by channels hang in a small pool, and
    # in a pool with one thread per core each switch between them takes milliseconds.
    Runtime(
        "intel-fpga-emulator", "FPGA Emulation", "fpga", emulated=True, queues=2, streams=True,
        drains=True, forgets=True, named_arch=True, waiting=("CL_CONFIG_CPU_TBB_NUM_WORKERS",),
    ),
    Runtime(
        "intel-cpu", "Intel(R) OpenCL", "cpu", drains=True, forgets=True, named_arch=True,
        threads=("CL_CONFIG_CPU_TBB_NUM_WORKERS", "DPCPP_CPU_NUM_CUS"),
    ),
    # Its only device reports all device types.
    Runtime("oclgrind", "Oclgrind", "cpu", emulated=True, reference=True),
)  # fmt: skip


def runtime_of(platform: str, is_cpu: bool) -> Runtime | None:
    """Return the well-known runtime of a platform, or None."""
    for entry in RUNTIMES:
        if entry.platform in platform and (is_cpu or entry.kind != "cpu" or entry.reference):
            return entry
    return None


def spins(platform: str) -> bool:
    """Return whether a platform's `clWaitForEvents` keeps a core busy, as NVIDIA's does."""
    return platform.startswith("NVIDIA CUDA")


def slug(vendor: str) -> str:
    """Return a short name for a vendor: `NVIDIA Corporation` becomes `nvidia`."""
    words = re.findall(r"[a-z0-9]+", vendor.lower().replace("(r)", "").replace("(tm)", ""))
    noise = {"corporation", "corp", "inc", "the", "project", "ltd", "limited", "co"}
    return "-".join([word for word in words if word not in noise][:2]) or "unknown"


@cache
def prepare() -> tuple[Finding, ...]:
    """Make the runtimes visible once per process; later calls return the same findings."""
    lib = Path(sys.prefix) / "lib"
    libraries = [lib / name for name in INTEL if (lib / name).exists()]
    findings = [*_preload(lib, libraries), *_target_arch(libraries)]
    try:
        findings += [*_register(libraries), *_private_cache()]
    except (HetpipeError, OSError) as error:
        findings.append(("broken", f"OpenCL has no folder for its files: {error}", ""))
        if not _user_set("POCL_CACHE_DIR"):
            os.environ.pop("POCL_CACHE_DIR", None)  # it is the parent process's own
    findings += _no_launcher_cache()
    if not libraries and sys.platform == "linux" and platform.machine() == "x86_64":
        findings.append(("missing", " and ".join(INTEL.values()), EMULATORS))
    return tuple(findings)


def _preload(lib: Path, libraries: list[Path]) -> list[Finding]:
    if not libraries:
        return []
    for pattern in DEPENDENCIES:
        for path in sorted(lib.glob(pattern)):
            try:
                ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
            except OSError as error:
                return [("broken", f"{path.name} of Intel's runtimes: {error}", EMULATORS)]
    return [("repaired", f"loaded from {lib} the libraries that Intel's runtimes need", "")]


def _register(libraries: list[Path]) -> list[Finding]:
    """Point the loader to a folder that registers the system's runtimes and `libraries`."""
    if _user_set("OCL_ICD_VENDORS"):
        kept = os.environ["OCL_ICD_VENDORS"]
        return [("ok", f"OCL_ICD_VENDORS={kept} is set and decides which runtimes exist", "")]
    if not libraries:
        return []
    entries = {path.name: path.read_text() for path in sorted(SYSTEM_VENDORS.glob("*.icd"))}
    entries |= {f"{path.name}.icd": f"{path}\n" for path in libraries}
    digest = hashlib.sha256(repr(sorted(entries.items())).encode()).hexdigest()[:12]
    folder = _cache() / f"icd-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in entries.items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            write_beside(path, text)
    _set("OCL_ICD_VENDORS", str(folder))
    names = ", ".join(INTEL[path.name] for path in libraries)
    return [("repaired", f"registered {names} through OCL_ICD_VENDORS={folder}", "")]


def _target_arch(libraries: list[Path]) -> list[Finding]:
    """Name a CPU to Intel's runtimes: on an unknown CPU they run scalar code, 60 times slower."""
    flags = cpu_flags()
    if not libraries or _user_set(TARGET_ARCH) or "GenuineIntel" in flags:
        return []
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= flags:
        arch = "skx"
    elif "avx2" in flags:
        arch = "core-avx2"
    else:
        return []
    _set(TARGET_ARCH, arch)
    return [("repaired", f"{TARGET_ARCH}={arch}: Intel's runtimes recognise the processor", "")]


def unloadable() -> list[Finding]:
    """Return findings for registered runtimes that the loader skips silently, with the reason."""
    named = os.environ.get("OCL_ICD_VENDORS")
    place = Path(named or SYSTEM_VENDORS)
    findings: list[Finding] = []
    for entry in sorted(place.glob("*.icd")) if place.is_dir() or not named else [place]:
        library = str(entry)
        try:
            library = entry.read_text().strip() if entry.suffix == ".icd" else library
            ctypes.CDLL(library)
        except (OSError, ValueError) as error:
            what = f"the runtime that {entry} registers cannot be loaded: {error}"
            cure = f"install the missing library, or remove {_removable(entry, library)}"
            findings.append(("missing", what, cure))
    return findings


def _removable(entry: Path, library: str) -> str:
    """Return the file whose removal ends a registration; `_register` writes its own files again."""
    if _user_set("OCL_ICD_VENDORS"):
        return str(entry)
    of_system = SYSTEM_VENDORS / entry.name
    return str(of_system) if of_system.exists() else library


def target_arch() -> str:
    """Return the CPU for which Intel's runtimes compile, or "" if the runtimes choose."""
    return os.environ.get(TARGET_ARCH, "")


def _private_cache() -> list[Finding]:
    """Give PoCL a kernel cache for this process alone: processes corrupt a shared cache.

    A lock reserves the cache until the process ends. The cache stays on disk for later processes.
    """
    if _user_set("POCL_CACHE_DIR"):
        own = Path(os.environ["POCL_CACHE_DIR"])
        problem = problem_of(own)
        if not problem:
            return [("ok", f"POCL_CACHE_DIR={own} is set", "")]
        warn_once(own, problem, _cache() / "pocl", "POCL_CACHE_DIR")
    if sys.platform == "win32":
        return []
    import fcntl

    for slot in range(SLOTS):
        folder = _cache() / "pocl" / str(slot)
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            continue
        # The open file holds the lock until the process ends.
        _set("POCL_CACHE_DIR", str(folder))
        return [("repaired", f"private kernel cache POCL_CACHE_DIR={folder}", "")]
    _set("POCL_CACHE_DIR", tempfile.mkdtemp(prefix="hetpipe-pocl-"))
    return [("repaired", f"temporary kernel cache {os.environ['POCL_CACHE_DIR']}", "")]


def check_cache(device_id: str, runtime: Runtime | None) -> None:
    """Raise `BackendError` for a runtime that compiles in a folder and has none."""
    if runtime is not None and runtime.late and "POCL_CACHE_DIR" not in os.environ:
        faults = (what for level, what, _ in prepare() if level == "broken")
        raise BackendError(f"{device_id} compiles in a folder: {'; '.join(faults)}")


def _no_launcher_cache() -> list[Finding]:
    """Turn off pyopencl's cache of launchers, a database in the user's cache folder.

    A worker fails if it cannot write there; without the cache, creating a launcher takes 1 ms.
    """
    if _user_set("PYOPENCL_NO_CACHE"):
        return [("ok", f"PYOPENCL_NO_CACHE={os.environ['PYOPENCL_NO_CACHE']} is set", "")]
    _set("PYOPENCL_NO_CACHE", "1")
    return [("repaired", "PYOPENCL_NO_CACHE=1: nothing depends on pyopencl's own cache", "")]


def _user_set(name: str) -> bool:
    value = os.environ.get(name)
    return value is not None and value != os.environ.get(OURS + name)


def _set(name: str, value: str) -> None:
    os.environ[name] = os.environ[OURS + name] = value


@cache
def _cache() -> Path:
    return cache_folder("opencl")


def cpu_flags() -> frozenset[str]:
    """Return the flags and the vendor of the first CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    words: list[str] = []
    for line in text.partition("\n\n")[0].splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "vendor_id"):
            words += value.split()
    return frozenset(words)
