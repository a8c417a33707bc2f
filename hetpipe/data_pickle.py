"""Reads and writes pickles of plain data; the reader cannot run code.

A pickle can name functions and classes, and Python's own reader imports and calls them. The reader
here makes lists, tuples, dicts, sets, texts, bytes and numbers, and refuses every name but
`complex`. Numpy arrays are refused, too: numpy trusts the sizes and pointers in a pickle. The
writer can store another object as its `parts`, from which the reader's `make` makes the object.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

Parts = tuple[str, Any]
"""A kind of object, and its content: plain data or further objects."""


def dumps(content: Any, parts: Callable[[Any], Parts | None]) -> bytes:
    """Return a pickle of plain data, and of the `parts` of other objects.

    Raises `pickle.PicklingError` for an object for which `parts` returns None.
    """
    file = io.BytesIO()
    _Writer(file, parts).dump(content)
    return file.getvalue()


def loads(data: bytes, make: Callable[[Parts], Any] | None = None) -> Any:
    """Return the content of a pickle; `make` makes an object from its parts.

    Raises `pickle.UnpicklingError` for a refused name, and the errors of `pickle.loads`.
    """
    return _Reader(data, make).load()


_PLAIN = frozenset({str, int, float, bool, tuple, list, dict, type(None), bytes})


class _Writer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, parts: Callable[[Any], Parts | None]) -> None:
        super().__init__(file, protocol=5)
        self._parts = parts

    def persistent_id(self, value: Any) -> Any:
        if type(value) in _PLAIN:  # nearly all values
            return None
        if isinstance(value, complex):
            return "complex", (value.real, value.imag)
        return self._parts(value)

    def reducer_override(self, value: Any) -> Any:
        raise pickle.PicklingError(f"{type(value).__name__} {value!r:.100} is no plain data")


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, make: Callable[[Parts], Any] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._make = make

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "complex"):  # how Python's own writer stores a complex
            return complex
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")

    def persistent_load(self, pid: Any) -> Any:
        if self._make is None:
            raise pickle.UnpicklingError("it refers to an object that is not in the file")
        kind, value = pid
        return complex(*value) if kind == "complex" else self._make((kind, value))
