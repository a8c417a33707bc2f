"""Turns objects into parts that travel between processes, and back, without copies of arrays.

Hosts may differ in Python, torch and numpy. So values of numpy and paths, whose pickles name
modules that move from version to version, are packed in forms that depend on hetpipe alone.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NUMBERS = np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?"


class Packed(NamedTuple):
    """A pickled object: the pickle, then the bytes of large arrays."""

    parts: Sequence[Any]

    def unpack(self) -> Any:
        """Return the object. The bytes must come from a trusted process: they may run code."""
        return pickle.loads(self.parts[0], buffers=self.parts[1:])


def pack(message: Any) -> Packed:
    """Return an object as parts. A packed object is returned unchanged."""
    if isinstance(message, Packed):
        return message
    buffers: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=5, buffer_callback=buffers.append)
    pickler.dispatch_table = {**copyreg.dispatch_table, **_REDUCERS}
    pickler.dump(message)
    return Packed([file.getbuffer(), *(buffer.raw() for buffer in buffers)])


def _make_array(data: Any, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(data, dtype).reshape(shape)


def _make_scalar(data: bytes, dtype: str) -> Any:
    return np.frombuffer(data, dtype)[0]


def _make_path(text: str) -> Path:
    return Path(text)


def _array(array: np.ndarray[Any, Any]) -> Any:
    if array.dtype.kind not in "biufc":
        return array.__reduce_ex__(5)
    # Not of the array's memoryview: Python 3.11 crashes when it frees both in a reference cycle.
    whole: Any = np.asarray(array, order="C")
    return _make_array, (pickle.PickleBuffer(whole), array.dtype.str, array.shape)


def _scalar(scalar: np.generic) -> Any:
    return _make_scalar, (scalar.tobytes(), scalar.dtype.str)


def _dtype(dtype: np.dtype[Any]) -> Any:
    return np.dtype, (dtype.str,)


def _path(path: Path) -> Any:
    return _make_path, (str(path),)


_DTYPES = [np.dtype(code) for code in NUMBERS]
_REDUCERS: Mapping[type, Callable[[Any], Any]] = {
    np.ndarray: _array,
    **{dtype.type: _scalar for dtype in _DTYPES},
    **{type(dtype): _dtype for dtype in _DTYPES},
    type(Path()): _path,
}
