"""Captures that are kept on disk, so that a second start of the same model need not export it.

They are data: records of capture, graphs as lists of operator names, and arrays of numbers. A
reader makes nothing else of an entry, whoever has written it.
"""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import numpy as np

from hetpipe import data_pickle
from hetpipe.capture.facts import Facts
from hetpipe.capture.indices import IndexBound
from hetpipe.capture.layers import Layer, LayerGraph
from hetpipe.capture.program import PassPrograms, Program, Slot, StageGraphs
from hetpipe.entries import Entries, key_of

__all__ = ["key_of", "load", "store"]

ENTRIES = Entries("captures", "pickle", most=200, variable="HETPIPE_CACHE")
RECORDS = (Facts, IndexBound, Layer, LayerGraph, PassPrograms, Program, Slot, StageGraphs)


def load(key: str) -> Any:
    """The content of an entry; None if there is none. Warns with `CacheWarning` if it is damaged,
    may be another user's, or holds anything else than data."""
    data = ENTRIES.load(key)
    if data is None:
        return None
    try:
        return data_pickle.loads(data, (*RECORDS, *_of_arrays()))
    except Exception as error:  # whatever a pickle of another time raises
        ENTRIES.refuse(key, error)
        return None


def store(key: str, content: Any) -> None:
    """Store an entry. Warns with `CacheWarning` if that fails, as on a full disk, and goes on."""
    ENTRIES.store(key, pickle.dumps(content, protocol=5))


@cache
def _of_arrays() -> tuple[Any, ...]:
    """The functions and classes of numpy that make an array of numbers."""
    arrays = (np.zeros(2), np.zeros((2, 2))[:, 0], np.float32(0))  # each is pickled in its own way
    return (np.ndarray, np.dtype, *(array.__reduce_ex__(5)[0] for array in arrays))
