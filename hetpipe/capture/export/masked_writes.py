"""Rewrites `h[mask] = v`, with a mask of truth values, as a choice of elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from hetpipe.capture.export.unsupported import where
from hetpipe.errors import CaptureError

aten = torch.ops.aten


def write_by_where(graph: fx.Graph) -> None:
    """Replace writes at a mask by `torch.where`, if all positions get the same value.

    Raises `CaptureError` for other writes and for reads at a mask: their shapes depend on values.
    """
    for node in list(graph.nodes):
        if node.target is not aten.index_put.default:
            continue
        source, indices, value, *options = node.args
        masks = [i for i in indices if i is not None and i.meta["val"].dtype is torch.bool]
        if not masks:
            continue
        accumulates = bool(options and options[0]) or bool(node.kwargs.get("accumulate"))
        if len(indices) > 1 or accumulates or not _is_one(source, masks[0], value):
            raise CaptureError(
                f"a write at a mask{where(node)} puts another value at each place, and how many "
                "there are depends on the mask: use torch.where with a value for "
                "every place"
            )
        _replace(graph, node, source, masks[0], value)


def _is_one(source: fx.Node, mask: fx.Node, value: fx.Node) -> bool:
    """Return whether all positions get the same value; False if a shape depends on values."""
    inner = source.meta["val"].ndim - mask.meta["val"].ndim
    outer = value.meta["val"].shape[: max(0, value.meta["val"].ndim - inner)]
    return all(isinstance(extent, int) and extent == 1 for extent in outer)


def _replace(graph: fx.Graph, node: fx.Node, source: Any, mask: Any, value: Any) -> None:
    result, chosen = node.meta["val"], mask.meta["val"]
    shape = [*chosen.shape, *[1] * (result.ndim - chosen.ndim)]
    assert isinstance(result, FakeTensor)
    with graph.inserting_before(node), result.fake_mode:
        spread = graph.call_function(aten.view.default, (mask, shape))
        spread.meta = {**node.meta, "val": torch.empty(shape, dtype=torch.bool)}
        written = graph.call_function(aten.where.self, (spread, value, source))
        written.meta = dict(node.meta)
    node.replace_all_uses_with(written)
    graph.erase_node(node)
