"""Summarises a captured model: everything that is the same for all its micro-batch sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from hetpipe.capture.export.index_bounds import IndexBound, index_bounds
from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.program import BUFFER, COUNT


@dataclass(frozen=True)
class ModelSummary:
    """Names of layers and of buffers that passes read or update, index bounds and a fingerprint.

    `samples` is the size of the graph from which the summary was made.
    """

    samples: int
    layer_names: tuple[str, ...]
    buffers: frozenset[str]
    updated_buffers: frozenset[str]
    has_count: bool  # loss_fn returns (sum, count)
    fingerprint: str
    indices: tuple[IndexBound, ...]
    rows: dict[str, int]  # number of rows in the first part, by split parameter


def summarize(flat: FlatGraph) -> ModelSummary:
    """Return the summary of a labelled graph."""
    read = {name for role, name in flat.inputs.values() if role == BUFFER}
    return ModelSummary(
        samples=flat.samples,
        layer_names=flat.layer_names,
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
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()
