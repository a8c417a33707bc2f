"""hetpipe's attention on graphics cards: scores stay in registers and in local memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from torch import fx

from ..gpu.tiles import VECTOR, group_of
from ..lower.builder import Builder, node_shape
from ..lower.expr import Value
from ..lower.launch import Kernel
from ..lower.reduce import reduce
from ..lower.reductions import SUM
from ..lower.registry import lowers_on_cards
from ..lower.signature import Argument
from ._common import arguments
from .attention import Heads, as_heads, heads_of, matrix, sizes

ITEM, DEPTH = 4, 16
"""Rows of a work-item, and steps of a product in local memory."""
SPANS = (2, 4, 8)
"""Columns of a work-item; a work-group has the fewest that suffice."""


@lowers_on_cards("hetpipe.attention.default")
def attention(builder: Builder, node: fx.Node) -> None:
    """Results: (out, logsumexp)."""
    query_node, key_node, value_node, causal, scale = arguments(node)
    query, key, value = (heads_of(builder, n) for n in (query_node, key_node, value_node))
    out = builder.new(query.rows_first(value.cols), "float32")
    logsumexp = builder.new(node_shape(query_node)[:-1], "float32")
    args: dict[str, Argument] = {
        **sizes(query, key, value), "causal": int(causal), "scale": float(scale), "out": out,
        "lse": logsumexp,
    }  # fmt: skip
    matrices = {"query": query, "key": key, "value": value}
    _launch_tiles(builder, "attention", value.cols, matrices, args)
    shape = (*node_shape(query_node)[:-1], value.cols)
    results = (as_heads(builder, out, shape), builder.pool.load(logsumexp))
    builder.define_results(node, results)


@lowers_on_cards("hetpipe.attention_backward.default")
def attention_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (grad_query, grad_key, grad_value)."""
    *tensors, causal, scale = arguments(node)
    grad, query, key, value = (heads_of(builder, n) for n in tensors[:4])
    gradients = [builder.new(x.rows_first(x.cols), "float32") for x in (query, key, value)]
    terms = builder.apply("{0} * {1}", "float32", *map(builder.expr, (tensors[0], tensors[4])))
    args: dict[str, Argument] = {
        **sizes(query, key, value), "causal": int(causal), "scale": float(scale),
        "lse": builder.value(tensors[5]),
        "shift": reduce(builder, terms, [len(terms.shape) - 1], SUM),
    }  # fmt: skip
    _launch_gradients(builder, query, key, value, grad, gradients, args)
    results = zip(gradients, tensors[1:4], strict=True)
    builder.define_results(node, tuple(as_heads(builder, m, node_shape(n)) for m, n in results))


def _launch_gradients(
    builder: Builder, query: Heads, key: Heads, value: Heads, grad: Heads,
    gradients: Sequence[Value], args: Mapping[str, Argument],
) -> None:  # fmt: skip
    """Launch the kernel of each gradient; see `kernels/gpu/attention_backward.cl`."""
    by_query = {"mine": query, "other": key, "mine_value": grad, "other_value": value}
    by_key = {"mine": key, "other": query, "mine_value": value, "other_value": grad}
    kinds = (
        (by_query, query.cols, "QUERY_ROWS"),
        (by_key, key.cols, "KEY_ROWS"),
        (by_key, value.cols, "OF_VALUES"),
    )
    for out, (matrices, cols, kind) in zip(gradients, kinds, strict=True):
        own = {**args, "gradient": out}
        _launch_tiles(builder, "attention_backward", cols, matrices, own, kind)


def _launch_tiles(
    builder: Builder, name: str, cols: int, matrices: Mapping[str, Heads],
    args: Mapping[str, Argument], *macros: str,
) -> None:  # fmt: skip
    """Launch a kernel that needs `kernels/gpu/scores.cl`, for a result with `cols` columns.

    The result has the rows of the first matrix.
    """
    rows, group = next(iter(matrices.values())), group_of(builder.device)
    span = next((group * n for n in SPANS if group * n >= cols), group * SPANS[-1])
    width = VECTOR if all(has_vectors(x) for x in matrices.values()) else 1
    loads = [f"{side}_{load}" for side in "AB" for load in ("ALONG=K", f"WIDTH={width}")]
    kernel = Kernel.of_files(
        name, ("gpu/tile.cl", "exp.cl", "gpu/scores.cl", f"gpu/{name}.cl"),
        f"GROUP={group}", f"ITEM={ITEM}", f"DEPTH={DEPTH}", f"SPAN={span}", *loads, *macros,
    )  # fmt: skip
    blocks, slices = math.ceil(rows.rows / (group * ITEM)), math.ceil(cols / span)
    size = (blocks * group, rows.count * group, slices)
    builder.launch(kernel, size, {**_matrices(matrices), **args}, (group, group, 1))


def _matrices(matrices: Mapping[str, Heads]) -> dict[str, Argument]:
    """Return the arguments of several matrices."""
    return {k: v for name, x in matrices.items() for k, v in matrix(name, x).items()}


def has_vectors(x: Heads) -> bool:
    """Return whether each row consists of aligned vectors in memory."""
    *steps, near = x.strides
    return near == 1 and not any(n % VECTOR for n in (*steps, x.offset, x.cols))
