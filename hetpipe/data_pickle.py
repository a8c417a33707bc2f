"""Reads pickles of plain data, and of records that the reader names: they cannot run code.

A pickle names functions and classes, and an ordinary reader imports and calls them. This one knows
lists, dicts, sets, texts and numbers, and refuses every name that it was not given.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any


def loads(data: bytes, known: Collection[Any] = ()) -> Any:
    """Return the content of a pickle that names only the classes and functions in `known`.

    Raises `pickle.UnpicklingError` for another name; damaged bytes raise as `pickle.loads` does.
    """
    return _Reader(data, known).load()


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, known: Collection[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._known = {(each.__module__, each.__qualname__): each for each in (complex, *known)}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain data")
        return self._known[module, name]

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")
