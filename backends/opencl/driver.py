"""pyopencl, imported on first use, and its errors turned into ours."""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

from hetpipe.errors import BackendError

from .runtimes import EMULATORS, POCL, prepare

NOISE = b"Unknown host CPU"
_warnings_lock = threading.Lock()
"""Held while warnings are off: the filters are those of the whole process."""


@cache
def driver() -> Any:
    """The module pyopencl, with every runtime made visible first.

    Raises `BackendError` with a cure if it cannot be imported.
    """
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
    """Have pyopencl write the callers of kernels that are alike once.

    It writes and compiles Python code for every kernel object, and a large graph has a thousand
    objects of some fifty kernels. A pyopencl that works otherwise is left alone.
    """
    with suppress(ImportError, AttributeError):
        from pyopencl import invoker

        written = invoker._generate_enqueue_and_set_args_module
        invoker._generate_enqueue_and_set_args_module = cache(written)


@contextmanager
def _without_noise() -> Iterator[None]:
    """Hide the lines that Intel's runtime prints on another maker's processor; print the others."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as caught:
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
    """All platforms. Raises `BackendError` with cures if there is none."""
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
    """Hide pyopencl's warnings, of a compiler's remarks and of kernels of one name."""
    with _warnings_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class errors:
    """Turn pyopencl's errors into a `BackendError` with the device and its activity.

    Every run of a graph enters it several times, for a third of a generator's time.
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
