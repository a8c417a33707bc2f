"""Facts of a captured model that hold for all its micro-batch sizes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from hetpipe.capture.export.index_bounds import IndexBound, index_bounds
from hetpipe.capture.flat_graph import Flat
from hetpipe.capture.program import BUFFER, COUNT


@dataclass(frozen=True)
class Facts:
    """The names of layers, and of the buffers that passes read or update; `samples` of the graph
    that they come from."""

    samples: int
    layer_names: tuple[str, ...]
    buffers: frozenset[str]
    updated_buffers: frozenset[str]
    has_count: bool  # loss_fn returns (sum, count)
    fingerprint: str
    indices: tuple[IndexBound, ...]
    rows: dict[str, int]  # of the first part, by parameter that is split


def facts_of(flat: Flat) -> Facts:
    """The facts that a labelled graph says."""
    read = {name for role, name in flat.inputs.values() if role == BUFFER}
    return Facts(
        samples=flat.samples,
        layer_names=flat.layer_names,
        buffers=frozenset(read | flat.updated_buffers),
        updated_buffers=flat.updated_buffers,
        has_count=any(key[0] == COUNT for key, _ in flat.outputs),
        fingerprint=_fingerprint(flat),
        indices=index_bounds(flat),
        rows=flat.rows,
    )


def _fingerprint(flat: Flat) -> str:
    """A hash of operators, arguments, shapes and layers; values of parameters do not enter."""
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
