"""Helpers for lowerings: arguments, casts, and reasons to refuse a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Expr, Value

FLOATS = ("float16", "float32", "float64")
UNSIGNED = ("bool", "uint8")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument that is given by position or by name, else `default`."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def cast(builder: Builder, expr: Expr, dtype: str) -> Expr:
    """Return `expr` converted to `dtype` by torch's rules."""
    if expr.dtype == dtype:
        return expr
    if isinstance(expr, Const):
        whole = dtype not in FLOATS
        number = bool(expr.number) if dtype == "bool" else expr.number
        return builder.pool.make(Const, expr.shape, dtype, int(number) if whole else float(number))
    if dtype == "bool":
        return truth(builder, expr)
    return builder.apply("convert_{T}({0})", dtype, expr, weight=0)


def truth(builder: Builder, expr: Expr) -> Expr:
    """Return 1 where `expr` is not 0, else 0."""
    zero = builder.pool.make(Const, expr.shape, expr.dtype, 0.0 if expr.dtype in FLOATS else 0)
    return builder.apply("abs(convert_{M}({0} != {1}))", "bool", expr, zero)


def operands(builder: Builder, node: fx.Node, args: Any, dtype: str | None = None) -> list[Expr]:
    """Return `args`, in the node's shape and in `dtype` (default: the node's dtype)."""
    shape, dtype = node_shape(node), dtype or node_dtype(node)
    return [cast(builder, builder.expr(arg, shape, dtype), dtype) for arg in args]


def formula(builder: Builder, code: str, *args: Expr | float, weight: int = 1) -> Expr:
    """Return the C expression `code` in float32 of numbers and of expressions, broadcast."""
    shape = np.broadcast_shapes(*(arg.shape for arg in args if isinstance(arg, Expr)))
    wide = (
        builder.expand(arg, shape) if isinstance(arg, Expr) else builder.expr(float(arg), shape)
        for arg in args
    )
    return builder.apply(code, "float32", *wide, weight=weight)


def reshaped(builder: Builder, expr: Expr, shape: Sequence[int]) -> Expr:
    """Return a view with another shape and the same elements in row-major order."""
    return builder.view(expr, lambda layout: layout.reshape(tuple(shape)))


def choose(builder: Builder, condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return `yes` where `condition` (bool) holds, else `no`."""
    code = "select({2}, {1}, convert_{M}(-convert_{M}({0})))"
    return builder.apply(code, yes.dtype, condition, yes, no)


def why_not_float32(node: fx.Node) -> str | None:
    """Return why a float32 kernel cannot run a node, or None. Indices may be int64."""
    return _other_dtype(node, torch.int64) or _empty(node.all_input_nodes[:1])


def why_not_all_float32(node: fx.Node) -> str | None:
    """Return why kernels for non-empty float32 tensors cannot run a node, or None."""
    return why_not_float32_product(node) or _empty(node.all_input_nodes)


def why_not_float32_product(node: fx.Node) -> str | None:
    """Return why kernels for float32 tensors, which may be empty, cannot run a node, or None."""
    return _other_dtype(node)


def _other_dtype(node: fx.Node, *allowed: torch.dtype) -> str | None:
    for arg in node.all_input_nodes:
        val = arg.meta["val"]
        if isinstance(val, torch.Tensor) and val.dtype not in (torch.float32, *allowed):
            return f"its kernel takes float32, not {val.dtype}"
    return None


def _empty(nodes: Sequence[fx.Node]) -> str | None:
    shapes = (tuple(node.meta["val"].shape) for node in nodes)
    return next((f"an operand is empty: {shape}" for shape in shapes if 0 in shape), None)


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments, as `Any`: the operator's schema guarantees their types."""
    return tuple(node.args)


def optional(builder: Builder, name: str, tensor: Any, stand_in: Value) -> dict[str, Value | int]:
    """Return arguments `name` and `has_name`; no kernel reads a stand-in for an absent tensor."""
    value = builder.value(tensor) if isinstance(tensor, fx.Node) else tensor
    return {name: value or stand_in, f"has_{name}": int(value is not None)}
