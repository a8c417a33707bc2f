"""Imports pyopencl on first use, and turns its errors into `BackendError`."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from hetpipe.errors import BackendError
from hetpipe.memory import anonymous_file

from .runtimes import EMULATORS, POCL, prepare

NOISE = b"Unknown host CPU"
_warnings_lock = threading.Lock()
"""Held while warnings are off, because warning filters belong to the whole process."""


@cache
def driver() -> Any:
    """Make every runtime visible, and return pyopencl. Raises `BackendError` if it is missing."""
    prepare()
    try:
        import pyopencl
    except ImportError as error:
        raise BackendError(
            f"pyopencl cannot be imported ({error}): pip install pyopencl"
        ) from error
    _write_callers_once()
    return pyopencl


def _write_callers_once() -> None:
    """Make pyopencl generate a launcher once per kernel, not once per kernel object.

    pyopencl generates and compiles Python code for every kernel object, and a large graph has a
    thousand objects of some fifty kernels. pyopencl stays unchanged if it lacks the function.
    """
    with suppress(ImportError, AttributeError):
        from pyopencl import invoker

        written = invoker._generate_enqueue_and_set_args_module
        invoker._generate_enqueue_and_set_args_module = cache(written)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hide the lines that Intel's runtime prints on processors of other makers, and only these."""
    saved = os.dup(2)
    with open(anonymous_file(), "r+b") as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            caught.seek(0)
            for line in caught:
                if NOISE not in line:
                    os.write(2, line)


def platforms() -> list[Any]:
    """Return all OpenCL platforms. Raises `BackendError` with cures if there is none."""
    cl = driver()
    try:
        with _without_noise():
            platforms = list(cl.get_platforms())
    except cl.Error as error:
        if "PLATFORM_NOT_FOUND" not in str(error):
            raise BackendError(f"OpenCL's loader fails: {error}") from error
        platforms = []
    if not platforms:
        raise BackendError(
            f"no OpenCL runtime is installed: run `{EMULATORS}`, or `{POCL}`, or install the "
            "driver of your device"
        )
    return platforms


@contextmanager
def quiet() -> Iterator[None]:
    """Hide pyopencl's warnings about compiler output and about kernels with the same name."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class errors:
    """Turns pyopencl's errors into a `BackendError` that names the device and the activity.

    Each run of a graph enters this context several times; a generator would be much slower.
    """

    __slots__ = ("_device", "_doing")

    def __init__(self, device: str, doing: str) -> None:
        self._device, self._doing = device, doing

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        cl, device, doing = driver(), self._device, self._doing
        if isinstance(error, cl.MemoryError):
            raise BackendError(
                f"{device} is out of memory while {doing} ({_reason(error)}): use smaller "
                "micro-batches, more stages, or recompute"
            ) from error
        if isinstance(error, cl.Error):
            raise BackendError(f"{device} failed while {doing}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    return text if len(text) < 4000 else text[:2000] + "\n...\n" + text[-2000:]
