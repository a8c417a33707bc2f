"""Keeps captures on disk, so that a second start of the same model needs no export.

Entries are data: the fields of records, graphs as rows of plain values, and arrays of numbers.
Loading an entry never runs code from the entry.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from hetpipe import data_pickle
from hetpipe.buckets import Size
from hetpipe.capture.export.index_bounds import IndexBound, index_bounds
from hetpipe.capture.export.named_tensors import tensor_bytes
from hetpipe.capture.flat_graph import FlatGraph, parameters_of
from hetpipe.capture.layers import Layer, LayerGraph
from hetpipe.capture.program import BUFFER, COUNT, PassPrograms, Program, Slot, StageGraphs
from hetpipe.entries import Entries
from hetpipe.sdk.graph import graph_of_rows, graph_rows


@dataclass(frozen=True)
class ModelSummary:
    """Names of layers, of parameters, and of buffers that passes read or update; index bounds, and
    a fingerprint."""

    samples: int  # number of samples in the graph that is summarized
    layer_names: tuple[str, ...]
    parameters: frozenset[str]
    buffers: frozenset[str]
    updated_buffers: frozenset[str]
    has_count: bool  # loss_fn returns (sum, count)
    fingerprint: str
    indices: tuple[IndexBound, ...]
    rows: dict[str, int]  # by split parameter: number of rows in its first part


def summarize(flat: FlatGraph) -> ModelSummary:
    """Return the summary of a labelled graph."""
    read = {name for role, name in flat.inputs.values() if role == BUFFER}
    return ModelSummary(
        samples=flat.samples,
        layer_names=flat.layer_names,
        parameters=parameters_of(flat),
        buffers=frozenset(read | flat.updated_buffers),
        updated_buffers=flat.updated_buffers,
        has_count=any(key[0] == COUNT for key, _ in flat.outputs),
        fingerprint=_fingerprint(flat),
        indices=index_bounds(flat),
        rows=flat.rows,
    )


def _fingerprint(flat: FlatGraph) -> str:
    """Return a hash of operators, arguments, shapes and layers, without values of parameters."""
    index = {node: str(i) for i, node in enumerate(flat.graph.nodes)}
    digest = hashlib.sha256(repr(flat.precision).encode())
    for node in flat.graph.nodes:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), index.__getitem__)
        value = node.meta.get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ""
        role = flat.inputs.get(node, "")
        row = (node.op, str(node.target) if node.op == "call_function" else "", role)
        digest.update(repr((row, args, kwargs, shape, flat.layer.get(node))).encode())
    for name, value in sorted(flat.constants.items()):
        digest.update(name.encode() + tensor_bytes(value))
    return digest.hexdigest()


ENTRIES = Entries("captures", "pickle", most=200)
RECORDS = {
    each.__name__: (each, tuple(field.name for field in fields(each)))
    for each in (ModelSummary, IndexBound, Layer, LayerGraph, PassPrograms, Slot, StageGraphs)
}
"""Classes by name, each with the names of its fields."""
NUMBERS = "biufc"
"""The `kind`s of numpy's dtypes whose elements are numbers."""


def load(key: str) -> Any:
    """Load an entry; return None if no valid entry has this key.

    Warns with `CacheWarning` if the entry is damaged, may belong to another user, or holds anything
    but data.
    """
    data = ENTRIES.load(key)
    if data is None:
        return None
    try:
        return data_pickle.loads(data, _to_record)
    except Exception as error:  # a pickle of another version may raise anything
        ENTRIES.refuse(key, error)
        return None


def store(key: str, content: Any) -> None:
    """Store an entry. Warns with `CacheWarning` if that fails, for instance on a full disk."""
    ENTRIES.store(key, data_pickle.dumps(content, _to_data))


def _to_data(value: Any) -> data_pickle.Parts | None:
    """Convert a record, a program or an array to plain data."""
    if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in NUMBERS:
        scalar = isinstance(value, np.generic)
        return "array", (value.dtype.str, value.shape, value.tobytes(), scalar)
    if isinstance(value, Size):
        return "Size", value.parts
    if isinstance(value, Program):
        return "Program", (graph_rows(value.graph), value.inputs, value.outputs)
    record, names = RECORDS.get(type(value).__name__, (None, ()))
    if record is not type(value):
        return None
    return record.__name__, tuple(getattr(value, name) for name in names)


def _to_record(parts: data_pickle.Parts) -> Any:
    """Convert plain data back, as the inverse of `_to_data`; wrong data may raise any error."""
    kind, value = parts
    if kind == "array":
        text, shape, data, scalar = value
        dtype = np.dtype(text)
        if dtype.kind not in NUMBERS:
            raise ValueError(f"it has an array of {dtype}, whose elements are not numbers")
        array = np.frombuffer(bytearray(data), dtype).reshape(shape)
        return array[()] if scalar else array
    if kind == "Size":
        return Size(*value)
    if kind == "Program":
        rows, inputs, outputs = value
        return Program(graph_of_rows(rows), inputs, outputs)
    record, names = RECORDS[kind]
    instance = object.__new__(record)
    # Faster than a call of the class; a capture has many records.
    vars(instance).update(zip(names, value, strict=True))
    return instance
