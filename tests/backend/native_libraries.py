"""Libraries for the backend `native`, built once with the system's compiler."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hetpipe.backends.native import NativeBackend, include_folder

from hetpipe.sdk.backend import Device

INCLUDE = include_folder()
EXAMPLE = INCLUDE / "example"
FAULTS = Path(__file__).with_name("native_faults.c")


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="hetpipe-native-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def compiler() -> str:
    found = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if found is None or shutil.which("make") is None:
        pytest.skip("no C compiler here, or no make: install gcc and make")
    return found


@functools.cache
def built(*targets: str) -> Path:
    """Build targets of the example's Makefile and return their folder."""
    command = ["make", "-C", str(EXAMPLE), f"OUT={folder()}", f"CC={compiler()}", *targets]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder()


def example() -> Path:
    return built("all") / "libexample.so"


def open_library(path: Path) -> Device:
    """Open the first device of a library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_NATIVE", str(path))
        backend = NativeBackend()
        return backend.open(backend.discover()[0])


@functools.cache
def faulty(fault: str) -> Path:
    """Build a library with one fault of `native_faults.c`."""
    path = folder() / f"lib{fault.lower()}.so"
    compile_c(
        str(FAULTS), *operators(), f"-D{fault}", "-shared", "-o", str(path), "-lm", "-pthread"
    )
    return path


@functools.cache
def operators() -> list[str]:
    """Compile everything but the device once, for all faulty libraries."""
    sources = [EXAMPLE / "operators.c", EXAMPLE / "elements.c", EXAMPLE / "layers.c"]
    objects = []
    for source in (*sources, INCLUDE / "hetpipe_graph.c"):
        objects.append(str(folder() / f"{source.stem}.o"))
        compile_c(str(source), "-c", "-o", objects[-1])
    return objects


def compile_c(*arguments: str) -> None:
    flags = ["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function", "-fPIC"]
    flags += ["-fvisibility=hidden", f"-I{INCLUDE}", f"-I{EXAMPLE}"]
    done = subprocess.run([compiler(), *flags, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
