"""hetpipe's attention, forward and backward: scores stay in a core's registers and caches."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import fx

from ..lower.builder import Builder, node_shape
from ..lower.expr import Expr, Value
from ..lower.launch import Kernel
from ..lower.registry import lowers
from ._common import arguments, why_not_all_float32

LANES = 16
BLOCK = 64
"""Queries and keys per step; in the forward, also the queries per work-item."""


@dataclass(frozen=True)
class Heads:
    """`outer` x `inner` matrices of rows x cols in memory, and their strides in elements."""

    value: Value
    offset: int
    outer: int
    inner: int
    rows: int
    cols: int
    strides: tuple[int, int, int, int]  # of outer, inner, row and column

    @property
    def count(self) -> int:
        return self.outer * self.inner

    def rows_first(self, cols: int) -> tuple[int, ...]:
        """Return the shape of a result of the kernels: the heads of a row are side by side."""
        return self.outer, self.rows, self.inner, cols


def _kernel(builder: Builder, name: str, cols: int) -> Kernel:
    """Return a kernel for matrices of up to `cols` columns."""
    span = LANES << (math.ceil(cols / LANES) - 1).bit_length()
    files = ("cpu/common.cl", "cpu/attention.cl")
    return builder.device.kernel(name, files, f"SPAN={span}", f"BLOCK={BLOCK}")


def heads_of(builder: Builder, node: fx.Node) -> Heads:
    """Return an argument [outer, inner, rows, cols] or [outer, rows, cols] as matrices."""
    value, strides, offset = builder.strided(node)
    *front, rows, cols = node_shape(node)
    *front_strides, row, col = strides
    outer, inner = (*front, 1)[:2]
    outer_stride, inner_stride = (*front_strides, 0)[:2]
    return Heads(value, offset, outer, inner, rows, cols, (outer_stride, inner_stride, row, col))


def matrix(name: str, x: Heads) -> dict[str, Value | int]:
    """Return the arguments that the kernels declare by MATRIX."""
    outer, inner, row, col = x.strides
    strides = {"offset": x.offset, "outer": outer, "inner": inner, "row": row, "col": col}
    return {name: x.value, **{f"{name}_{which}": number for which, number in strides.items()}}


def sizes(query: Heads, key: Heads, value: Heads) -> dict[str, int]:
    return {
        "depth": query.cols, "width": value.cols, "inner": query.inner, "queries": query.rows,
        "keys": key.rows,
    }  # fmt: skip


def as_heads(builder: Builder, value: Value, shape: tuple[int, ...]) -> Expr:
    """Return a result in the graph's shape, without a copy."""
    if len(shape) == 3:
        return builder.pool.load(builder.reshape(value, shape))
    loaded = builder.pool.load(value)
    return builder.view(loaded, lambda layout: layout.permute((0, 2, 1, 3)))


@lowers("hetpipe.attention.default", supports=why_not_all_float32, kept=True)
def attention(builder: Builder, node: fx.Node) -> None:
    """Results: (out, logsumexp)."""
    query_node, key_node, value_node, causal, scale = arguments(node)
    query, key, value = (heads_of(builder, n) for n in (query_node, key_node, value_node))
    kernel = _kernel(builder, "attention", max(query.cols, value.cols))
    out = builder.new(query.rows_first(value.cols), "float32")
    logsumexp = builder.new(node_shape(query_node)[:-1], "float32")
    matrices = matrix("query", query) | matrix("key", key) | matrix("value", value)
    builder.launch(
        kernel, (math.ceil(query.rows / BLOCK), query.count),
        {
            **matrices, **sizes(query, key, value), "causal": int(causal), "scale": float(scale),
            "out": out, "lse": logsumexp,
        },
    )  # fmt: skip
    shape = (*node_shape(query_node)[:-1], value.cols)
    results = (as_heads(builder, out, shape), builder.pool.load(logsumexp))
    builder.define_results(node, results)


@lowers("hetpipe.attention_backward.default", supports=why_not_all_float32, kept=True)
def attention_backward(builder: Builder, node: fx.Node) -> None:
    """Results: (grad_query, grad_key, grad_value)."""
    *tensors, causal, scale = arguments(node)
    grad, query, key, value, out = (heads_of(builder, n) for n in tensors[:5])
    logsumexp = builder.value(tensors[5])
    gradients = [builder.new(x.rows_first(x.cols), "float32") for x in (query, key, value)]
    kernel = _kernel(builder, "attention_backward", max(query.cols, value.cols))
    rows = {"query": query, "key": key, "value": value, "grad": grad, "out": out}
    matrices: dict[str, Value | int] = {}
    for name, x in rows.items():
        matrices |= matrix(name, x)
    builder.launch(
        kernel, (query.count,),
        {
            **matrices, "lse": logsumexp, **sizes(query, key, value), "causal": int(causal),
            "scale": float(scale),
            "grad_query": gradients[0], "grad_key": gradients[1], "grad_value": gradients[2],
        },
    )  # fmt: skip
    results = zip(gradients, tensors[1:4], strict=True)
    builder.define_results(node, tuple(as_heads(builder, m, node_shape(n)) for m, n in results))
