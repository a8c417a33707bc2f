"""Kernels over whole rows of a product: the kernel that stores the product sends them the rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..lower.builder import Builder
from ..lower.expr import Expr, Rows, Value
from ..lower.signature import Argument

AFFINE = ("row_weight", "row_bias")
RUNNING = ("row_running_mean", "row_running_var", "row_new_mean", "row_new_var")


def softmax(builder: Builder, x: Expr, logarithm: bool) -> Value | None:
    """Return softmax over x's last dimension, or its logarithm; None if x is no waiting product."""
    results = _follow(builder, x, "softmax", (x.shape,), ("y",), {"row_logarithm": int(logarithm)})
    return None if results is None else results[0]


def layer_norm(
    builder: Builder, x: Expr, weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, ...] | None:
    """Return (y, mean, rstd) of layer norm over x's last dimension.

    Return None if x is no waiting product.
    """
    few = (*x.shape[:-1], 1)
    arguments: dict[str, Argument] = {"row_eps": float(eps)}
    for name, value in (("weight", weight), ("bias", bias)):
        arguments[f"row_has_{name}"] = int(value is not None)
        if value is not None:
            arguments[f"row_{name}"] = value
    return _follow(builder, x, "layer_norm", (x.shape, few, few), ("y", "mean", "rstd"), arguments)


def batch_norm(
    builder: Builder, x: Expr, affine: Sequence[Value | None], running: Sequence[Value | None],
    momentum: float, eps: float,
) -> tuple[Value, Value, Value, Value | None, Value | None] | None:  # fmt: skip
    """Return (y, mean, rstd, new mean, new variance) of batch norm over x [N][C][...].

    Return None if x is no waiting convolution. The last two are None without `running` statistics.
    """
    given = zip((*AFFINE, *RUNNING[:2]), (*affine, *running), strict=True)
    tensors = {name: value for name, value in given if value is not None}
    is_running = RUNNING[0] in tensors
    names = ("y", "mean", "rstd", *(("new_mean", "new_var") if is_running else ()))
    shapes = (x.shape, *[x.shape[1:2]] * (len(names) - 1))
    arguments: dict[str, Argument] = {
        **tensors, **{f"row_has_{name[4:]}": int(name in tensors) for name in AFFINE},
        "row_has_running": int(is_running), "row_channels": x.shape[1],
        "row_pixels": math.prod(x.shape[2:]), "row_momentum": float(momentum),
        "row_eps": float(eps),
    }  # fmt: skip
    results = _follow(builder, x, "batch_norm", shapes, names, arguments, by_channel=True)
    if results is None:
        return None
    y, mean, rstd, *new = results
    new_mean, new_var = new if new else (None, None)
    return y, mean, rstd, new_mean, new_var


def _follow(
    builder: Builder, x: Expr, file: str, shapes: tuple[tuple[int, ...], ...],
    names: tuple[str, ...], arguments: Mapping[str, Argument], by_channel: bool = False,
) -> tuple[Value, ...] | None:  # fmt: skip
    source = builder.pool.load(builder.reshape(builder.store(x), x.shape))
    results = [builder.new(shape, "float32") for shape in shapes]
    given = {f"row_{name}": value for name, value in zip(names, results, strict=True)}
    values = [each for each in arguments.values() if isinstance(each, Value)]
    for name in {"layer_norm": AFFINE, "batch_norm": (*AFFINE, *RUNNING)}.get(file, ()):
        if name not in arguments and name not in given:
            given[name] = results[0]  # any tensor: the kernel does not use it
    reads = tuple(builder.pool.load(value) for value in values)
    rows = Rows(
        x.shape, "float32", source, f"fpga/{file}.cl", {**arguments, **given}, reads, by_channel
    )
    return tuple(results) if builder.follow(rows, results) else None
