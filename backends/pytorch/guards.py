"""Guards indices in graphs for accelerators, on which an index out of range is not an exception.

On CUDA it would end all work of the process; other devices read other memory. A guarded graph
limits each index to its range and also returns the extremes of the indices. After the run, the host
compares the extremes with the bounds. Indices that the controller has checked need no guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hetpipe.sdk.graph import canonical, graph_calls
from hetpipe.sdk.indices import Bound, index_bounds

aten = torch.ops.aten


def guarded(graph: fx.GraphModule) -> tuple[fx.GraphModule, list[Bound]]:
    """Return the graph with guards, and the bounds of the guarded indices.

    If there are any, the graph's last output is new: int64 of shape (2 * bounds,), the least and
    the greatest index of each bound.
    """
    own = canonical(graph)
    bounds = [
        bound
        for node in graph_calls(own)
        for bound in index_bounds(node)
        if bound.index.meta["val"].numel() > 0
    ]
    if not bounds:
        return graph, []
    extremes: list[fx.Node] = []
    for bound in bounds:
        with own.graph.inserting_before(bound.node):
            safe = bound.index
            if bound.ignored is not None:
                ignored = _call(own, aten.eq.Scalar, safe, bound.ignored)
                safe = _call(own, aten.masked_fill.Scalar, safe, ignored, bound.low)
            wide = _call(own, aten._to_copy.default, safe, dtype=torch.int64)
            extremes += [_call(own, aten.amin.default, wide), _call(own, aten.amax.default, wide)]
            limited = _call(own, aten.clamp.default, bound.index, bound.low, bound.size - 1)
            if bound.ignored is not None:
                limited = _call(own, aten.where.self, ignored, bound.index, limited)
            bound.node.replace_input_with(bound.index, limited)
    output = own.graph.output_node()
    results: Any = output.args[0]
    with own.graph.inserting_before(output):
        joined = _call(own, aten.stack.default, extremes)
    output.args = ((*results, joined),)
    own.recompile()
    return own, bounds


def _call(graph: fx.GraphModule, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    node = graph.graph.call_function(target, args, kwargs)
    values = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node


def check_extremes(device_id: str, bounds: Sequence[Bound], extremes: Sequence[int]) -> None:
    """Raise `BackendError` for the first bound that an extreme breaks."""
    pairs = zip(extremes[::2], extremes[1::2], strict=True)
    for bound, (least, greatest) in zip(bounds, pairs, strict=True):
        if greatest >= bound.size:
            raise bound.error(device_id, greatest)
        if least < bound.low:
            raise bound.error(device_id, least)
