"""Kernels over whole rows of a product, which they receive from the kernel that stores it."""

from __future__ import annotations

from collections.abc import Mapping

from ..builder import Builder, Value
from ..expr import Expr, Rows
from ..signature import Argument


def softmax(builder: Builder, x: Expr, logarithm: bool) -> Value | None:
    """Softmax over the last dimension of x, or its logarithm, if x is a product that waits."""
    results = _follow(builder, x, "softmax", (x.shape,), ("y",), {"row_logarithm": int(logarithm)})
    return None if results is None else results[0]


def layer_norm(
    builder: Builder, x: Expr, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...] | None:
    """(y, mean, rstd) of layer norm over the last dimension of x, if x is a product that waits."""
    few = (*x.shape[:-1], 1)
    arguments: dict[str, Argument] = {"row_eps": float(eps)}
    for name, value in (("weight", weight), ("bias", bias)):
        arguments[f"row_has_{name}"] = int(value is not None)
        if value is not None:
            arguments[f"row_{name}"] = value
    return _follow(builder, x, "layer_norm", (x.shape, few, few), ("y", "mean", "rstd"), arguments)


def _follow(
    builder: Builder, x: Expr, file: str, shapes: tuple[tuple[int, ...], ...],
    names: tuple[str, ...], arguments: Mapping[str, Argument],
) -> tuple[Value, ...] | None:  # fmt: skip
    source = builder.pool.load(builder.reshape(builder.store(x), x.shape))
    results = [builder.new(shape, "float32") for shape in shapes]
    given = {f"row_{name}": value for name, value in zip(names, results, strict=True)}
    values = [each for each in arguments.values() if isinstance(each, Value)]
    for name in ("row_weight", "row_bias"):
        if f"row_has_{name[4:]}" in arguments and name not in arguments:
            given[name] = results[0]  # it is not read
    reads = tuple(builder.pool.load(value) for value in values)
    rows = Rows(x.shape, "float32", source, f"fpga/{file}.cl", {**arguments, **given}, reads)
    return tuple(results) if builder.follow(rows, results) else None
