"""Helpers for lowerings of elementwise operators."""

from __future__ import annotations

from typing import Any

from torch import fx

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import Const, Expr

FLOATS = ("float16", "float32", "float64")


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument, given by position or by name."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(name, default)


def cast(builder: Builder, expr: Expr, dtype: str) -> Expr:
    """Return `expr` converted to `dtype`, as torch converts."""
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
    """Return tensors and numbers in the node's shape and one dtype (default: the node's)."""
    shape, dtype = node_shape(node), dtype or node_dtype(node)
    return [cast(builder, builder.expr(arg, shape, dtype), dtype) for arg in args]


def choose(builder: Builder, condition: Expr, yes: Expr, no: Expr) -> Expr:
    """Return `yes` where `condition` (bool) holds, else `no`."""
    code = "select({2}, {1}, convert_{M}(-convert_{M}({0})))"
    return builder.apply(code, yes.dtype, condition, yes, no)
