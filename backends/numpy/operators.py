# mypy: disable-error-code="no-any-return"
# (numpy's functions return Any)
"""The table: operator name -> numpy function with the operator's own arguments.

The device casts every result to the dtype that the graph promises, so functions leave dtypes to
numpy's promotion, and ignore the arguments that speak of layout, memory or dtype (`**_`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import normalization as norm
from .convolution import convolution, convolution_backward
from .pooling import (
    adaptive_avg_pool2d,
    adaptive_avg_pool2d_backward,
    avg_pool2d,
    avg_pool2d_backward,
    max_pool2d,
    max_pool2d_backward,
)
from .random import keep_mask, uniform

Array = np.ndarray[Any, Any]
Dims = Sequence[int] | int | None


def _axes(dims: Dims) -> tuple[int, ...] | int | None:
    """torch's dims as numpy's axes: an empty list means all."""
    return (tuple(dims) or None) if isinstance(dims, (list, tuple)) else dims  # type: ignore[return-value]


def _erf(x: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(x), np.result_type(x, np.float32))


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def _clamp(x: Array, low: Any = None, high: Any = None) -> Array:
    x = x if low is None else np.maximum(x, low)
    return x if high is None else np.minimum(x, high)


# --- elementwise -------------------------------------------------------------------------------

_SQRT_HALF, _PDF = math.sqrt(0.5), 1 / math.sqrt(2 * math.pi)
_TANH_SCALE, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def _gelu(x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(_TANH_SCALE * (x + _CUBIC * x**3)))
    return 0.5 * x * (1 + _erf(x * _SQRT_HALF))


def _gelu_backward(dy: Array, x: Array, approximate: str = "none") -> Array:
    if approximate == "tanh":
        t = np.tanh(_TANH_SCALE * (x + _CUBIC * x**3))
        slope = _TANH_SCALE * (1 + 3 * _CUBIC * x * x)
        return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope)
    return dy * (0.5 * (1 + _erf(x * _SQRT_HALF)) + x * np.exp(-0.5 * x * x) * _PDF)


def _silu_backward(dy: Array, x: Array) -> Array:
    s = _sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def _lerp(a: Array, b: Array, weight: Any) -> Array:
    """torch's two-sided form: exact at both ends."""
    return np.where(np.abs(weight) < 0.5, a + weight * (b - a), b - (b - a) * (1 - weight))


def _div(a: Array, b: Any, rounding_mode: str | None = None) -> Array:
    if rounding_mode == "floor":
        return np.floor_divide(a, b)
    return np.trunc(np.true_divide(a, b)) if rounding_mode == "trunc" else np.true_divide(a, b)


_UNARY: dict[str, Callable[..., Any]] = {
    "abs": np.abs, "neg": np.negative, "sign": np.sign, "reciprocal": lambda x: 1 / x,
    "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "exp": np.exp, "expm1": np.expm1,
    "log": np.log, "log1p": np.log1p, "log2": np.log2, "sin": np.sin, "cos": np.cos,
    "tanh": np.tanh, "sigmoid": _sigmoid, "erf": _erf, "floor": np.floor, "ceil": np.ceil,
    "round": np.round, "trunc": np.trunc, "isnan": np.isnan, "isinf": np.isinf,
    "logical_not": np.logical_not, "bitwise_not": np.invert, "relu": lambda x: np.maximum(x, 0),
    "gelu": _gelu, "silu": lambda x: x * _sigmoid(x),
    "clamp": _clamp, "hardtanh": lambda x, low=-1.0, high=1.0: _clamp(x, low, high),
    "leaky_relu": lambda x, slope=0.01: np.where(x > 0, x, slope * x),
    "elu": lambda x, a=1.0, s=1.0, i=1.0: s * np.where(
        x > 0, x, a * np.expm1(np.minimum(x * i, 0))),
    "alias": np.asarray, "detach": np.asarray, "clone": lambda x, **_: x,
    "lift_fresh_copy": np.asarray, "_to_copy": lambda x, **_: x,
}  # fmt: skip

_BINARY: dict[str, Callable[..., Any]] = {
    "add": lambda a, b, alpha=1: a + b if alpha == 1 else a + alpha * b,
    "sub": lambda a, b, alpha=1: a - (b if alpha == 1 else alpha * b),
    "mul": np.multiply, "div": np.true_divide, "fmod": np.fmod, "remainder": np.mod,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal, "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or, "bitwise_xor": np.bitwise_xor, "lerp": _lerp,
    "masked_fill": lambda x, m, v: np.where(m, v, x),
    "fill": lambda x, v: np.broadcast_to(v, x.shape),
}  # fmt: skip
"""Operators with a Tensor and a Scalar overload."""

_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "clamp.Tensor": _clamp, "clamp_min.default": np.maximum, "clamp_max.default": np.minimum,
    "clamp_min.Tensor": np.maximum, "clamp_max.Tensor": np.minimum,
    "maximum.default": np.maximum, "minimum.default": np.minimum, "atan2.default": np.arctan2,
    "logical_and.default": np.logical_and, "logical_or.default": np.logical_or,
    "logical_xor.default": np.logical_xor,
    "div.Tensor_mode": _div, "div.Scalar_mode": _div, "pow.Tensor_Scalar": np.power,
    "pow.Tensor_Tensor": np.power, "pow.Scalar": np.power,
    "rsub.Scalar": lambda a, b, alpha=1: b - alpha * a,
    "where.self": np.where,
    "copy.default": lambda x, src: np.broadcast_to(src, x.shape),
    "addcmul.default": lambda x, a, b, value=1: x + value * (a * b),
    "addcdiv.default": lambda x, a, b, value=1: x + value * (a / b),
    "threshold_backward.default": lambda dy, x, limit: np.where(x <= limit, 0, dy),
    "tanh_backward.default": lambda dy, y: dy * (1 - y * y),
    "sigmoid_backward.default": lambda dy, y: dy * (1 - y) * y,
    "gelu_backward.default": _gelu_backward, "silu_backward.default": _silu_backward,
    "leaky_relu_backward.default": lambda dy, x, slope, _: np.where(x > 0, dy, dy * slope),
    "hardtanh_backward.default": lambda dy, x, lo, hi: np.where((x > lo) & (x < hi), dy, 0),
    "elu_backward.default": lambda dy, a, s, i, result, x: dy * np.where(
        x > 0, s, i * (x + a * s) if result else i * a * s * np.exp(np.minimum(x * i, 0))),
}  # fmt: skip

# --- shapes and indices --------------------------------------------------------------------------


def _expand(x: Array, size: Sequence[int], **_: Any) -> Array:
    fill = (1,) * (len(size) - x.ndim) + x.shape
    return np.broadcast_to(x, [f if s == -1 else s for s, f in zip(size, fill, strict=True)])


def _squeeze(x: Array, dims: Dims = None) -> Array:
    chosen = range(x.ndim) if dims is None else dims if isinstance(dims, Sequence) else (dims,)
    return x.squeeze(tuple(d for d in chosen if x.shape[d] == 1)) if x.ndim else x


def _cut(x: Array, dim: int, index: Any) -> tuple[Any, ...]:
    return (slice(None),) * (dim % x.ndim) + (index,)


def _slice(x: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Array:
    return x[_cut(x, dim, slice(start, end, step))]


def _scatter_into(x: Array, part: Array, dim: int, index: Any) -> Array:
    x = x.copy()
    x[_cut(x, dim, index)] = part
    return x


def _slice_scatter(
    x: Array, part: Array, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Array:
    return _scatter_into(x, part, dim, slice(start, end, step))


def _split(x: Array, size: int | Sequence[int], dim: int = 0) -> list[Array]:
    if isinstance(size, int):
        return np.split(x, range(size, x.shape[dim], size), dim)
    return np.split(x, np.cumsum(size)[:-1], dim)


def _pad_constant(x: Array, pad: Sequence[int], value: float = 0.0) -> Array:
    pairs = [(pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2)][::-1]
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    y = np.pad(x, [(max(a, 0), max(b, 0)) for a, b in pairs], constant_values=value)
    sizes = [max(-b, 0) for _, b in pairs]  # a negative width cuts
    return y[
        tuple(slice(max(-a, 0), n - b) for (a, _), b, n in zip(pairs, sizes, y.shape, strict=True))
    ]


def _where_index(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if i is None else i for i in indices)


def _index_put(x: Array, indices: Sequence[Any], value: Array, accumulate: bool = False) -> Array:
    x = x.copy()
    if accumulate:
        np.add.at(x, _where_index(indices), value)
    else:
        x[_where_index(indices)] = value
    return x


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    """The index tuple that gathers `index` [...] along `dim`."""
    where: list[Array] = list(np.indices(index.shape, sparse=True))
    where[dim] = index
    return tuple(where)


def _scatter(x: Array, dim: int, index: Array, src: Any, accumulate: bool = False) -> Array:
    if x.ndim == 0:
        return x + src if accumulate else np.asarray(src).reshape(())
    if isinstance(src, np.ndarray) and src.ndim:
        src = src[tuple(map(slice, index.shape))]
    return _index_put(x, _along(index, dim), src, accumulate)


def _gather(x: Array, dim: int, index: Array, **_: Any) -> Array:
    return x[_along(index, dim)[: x.ndim]] if x.ndim else np.broadcast_to(x, index.shape)


def _embedding(weight: Array, index: Array, *_: Any) -> Array:
    return weight[index]


def _embedding_backward(dy: Array, index: Array, count: int, padding: int, by_count: bool) -> Array:
    dw = np.zeros((count, dy.shape[-1]), dy.dtype)
    if by_count:
        dy = dy / np.bincount(index.ravel(), minlength=count)[index][..., None]
    used = index != padding
    np.add.at(dw, index[used], dy[used])
    return dw


_SHAPES: dict[str, Callable[..., Any]] = {
    "view.default": lambda x, size: x.reshape(size),
    "_unsafe_view.default": lambda x, size: x.reshape(size),
    "permute.default": lambda x, dims: x.transpose(dims), "t.default": np.transpose,
    "transpose.int": lambda x, a, b: x.swapaxes(a, b) if x.ndim else x, "expand.default": _expand,
    "squeeze.default": _squeeze, "squeeze.dim": _squeeze, "squeeze.dims": _squeeze,
    "unsqueeze.default": np.expand_dims, "slice.Tensor": _slice,
    "select.int": lambda x, dim, index: x[_cut(x, dim, index)],
    "slice_scatter.default": _slice_scatter,
    "select_scatter.default": _scatter_into,
    "slice_backward.default": lambda dy, size, *at: _slice_scatter(np.zeros(size), dy, *at),
    "select_backward.default": lambda dy, size, *at: _scatter_into(np.zeros(size), dy, *at),
    "cat.default": lambda xs, dim=0: np.concatenate([x for x in xs if x.shape != (0,)] or xs, dim),
    "stack.default": np.stack, "split.Tensor": _split, "split_with_sizes.default": _split,
    "unbind.int": lambda x, dim=0: list(np.moveaxis(x, dim, 0)),
    "repeat.default": lambda x, times: np.tile(x, times), "flip.default": np.flip,
    "roll.default": lambda x, by, dims=(): np.roll(x, by, tuple(dims) or None),
    "constant_pad_nd.default": _pad_constant, "diagonal.default": np.diagonal,
    "tril.default": np.tril, "triu.default": np.triu,
    "index.Tensor": lambda x, i: x[_where_index(i)],
    "_unsafe_index.Tensor": lambda x, i: x[_where_index(i)],
    "index_put.default": _index_put, "_unsafe_index_put.default": _index_put,
    "index_select.default": lambda x, dim, i: np.take(x, i.reshape(-1), dim),
    "gather.default": _gather,
    "scatter.src": _scatter, "scatter.value": _scatter,
    "scatter_add.default": lambda x, dim, i, src: _scatter(x, dim, i, src, accumulate=True),
    "embedding.default": _embedding, "embedding_dense_backward.default": _embedding_backward,
    "full.default": lambda size, value, **_: np.full(size, value),
    "full_like.default": lambda x, value, **_: np.full(x.shape, value),
    "zeros.default": lambda size, **_: np.zeros(size),
    "ones.default": lambda size, **_: np.ones(size),
    "zeros_like.default": lambda x, **_: np.zeros(x.shape),
    "ones_like.default": lambda x, **_: np.ones(x.shape),
    "empty.memory_format": lambda size, **_: np.zeros(size),
    "empty_permuted.default": lambda size, *_, **__: np.zeros(size),
    "empty_like.default": lambda x, **_: np.zeros(x.shape),
    "new_zeros.default": lambda x, size, **_: np.zeros(size),
    "new_ones.default": lambda x, size, **_: np.ones(size),
    "new_full.default": lambda x, size, value, **_: np.full(size, value),
    "scalar_tensor.default": lambda value, **_: np.asarray(value),
    "arange.default": lambda end, **_: np.arange(end),
    "arange.start": lambda start, end, **_: np.arange(start, end),
    "arange.start_step": lambda start, end, step=1, **_: np.arange(start, end, step),
}  # fmt: skip

# --- reductions, products, losses ----------------------------------------------------------------


def _reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dims=None, keepdim=False, **_: fn(x, axis=_axes(dims), keepdims=keepdim)


def _extreme(value: Callable[..., Any], place: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dim, keepdim=False: (
        value(x, axis=dim, keepdims=keepdim),
        place(x, axis=dim, keepdims=keepdim),
    )


def _variance(x: Array, dims: Dims = None, *, correction: Any = 1, keepdim: bool = False) -> Array:
    axes = _axes(dims)
    mean = x.mean(axis=axes, keepdims=True)
    count = x.size // max(mean.size, 1) - (1 if correction is None else correction)
    total = np.square(x - mean).sum(axis=axes, keepdims=keepdim)
    return np.asarray(np.divide(total, max(count, 0)))


def _nll_weights(target: Array, weight: Array | None, ignore: int, dtype: Any) -> Array:
    used = target != ignore
    if weight is None:
        return used.astype(dtype)
    return np.where(used, weight[np.where(used, target, 0)], 0)


def _nll(x: Array, target: Array, weight: Array | None, how: int, ignore: int) -> tuple[Any, Any]:
    """Loss and total weight; x [N, C] or [C] or [N, C, h, w]; how: 0 none, 1 mean, 2 sum."""
    each = _nll_weights(target, weight, ignore, x.dtype)
    axis = 0 if x.ndim == 1 else 1
    index = np.expand_dims(np.where(target == ignore, 0, target), axis)
    loss = -np.take_along_axis(x, index, axis).squeeze(axis) * each
    total = each.sum()
    return (loss, total * 0) if how == 0 else (loss.sum() / (total if how == 1 else 1), total)


def _nll_backward(
    dy: Array, x: Array, target: Array, weight: Array | None, how: int, ignore: int, total: Array
) -> Array:
    each = _nll_weights(target, weight, ignore, x.dtype)
    axis = 0 if x.ndim == 1 else 1
    index = np.expand_dims(np.where(target == ignore, 0, target), axis)
    dx = np.zeros_like(x)
    np.put_along_axis(
        dx, index, np.expand_dims(-each * (dy / total if how == 1 else dy), axis), axis
    )
    return dx


def _reduced_loss(x: Array, how: int) -> Any:
    return x if how == 0 else x.mean() if how == 1 else x.sum()


def _mse_backward(dy: Array, x: Array, target: Array, how: int) -> Array:
    return 2 * (x - target) * (dy / x.size if how == 1 else dy)


_OTHER: dict[str, Callable[..., Any]] = {
    "sum.default": _reduction(np.sum), "sum.dim_IntList": _reduction(np.sum),
    "mean.default": _reduction(np.mean), "mean.dim": _reduction(np.mean),
    "prod.default": _reduction(np.prod), "prod.dim_int": _reduction(np.prod),
    "amax.default": _reduction(np.max), "amin.default": _reduction(np.min),
    "max.default": np.max, "min.default": np.min,
    "any.default": np.any, "any.dim": _reduction(np.any), "any.dims": _reduction(np.any),
    "all.default": np.all, "all.dim": _reduction(np.all),
    "argmax.default": _reduction(np.argmax), "argmin.default": _reduction(np.argmin),
    "max.dim": _extreme(np.max, np.argmax), "min.dim": _extreme(np.min, np.argmin),
    "var.correction": _variance,
    "var_mean.correction": lambda x, dims=None, **how: (
        _variance(x, dims, **how), _reduction(np.mean)(x, dims, how.get("keepdim", False))),
    "cumsum.default": lambda x, dim, **_: np.cumsum(x, dim) if x.ndim else x,
    "mm.default": np.matmul, "bmm.default": np.matmul, "mv.default": np.matmul,
    "dot.default": np.dot,
    "addmm.default": lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "baddbmm.default": lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "nll_loss_forward.default": _nll, "nll_loss_backward.default": _nll_backward,
    "nll_loss2d_forward.default": _nll, "nll_loss2d_backward.default": _nll_backward,
    "mse_loss.default": lambda x, y, how=1: _reduced_loss(np.square(x - y), how),
    "mse_loss_backward.default": _mse_backward,
    "convolution.default": convolution, "convolution_backward.default": convolution_backward,
    "max_pool2d_with_indices.default": max_pool2d,
    "max_pool2d_with_indices_backward.default": max_pool2d_backward,
    "avg_pool2d.default": avg_pool2d, "avg_pool2d_backward.default": avg_pool2d_backward,
    "_adaptive_avg_pool2d.default": adaptive_avg_pool2d,
    "_adaptive_avg_pool2d_backward.default": adaptive_avg_pool2d_backward,
    **norm.OPERATORS,
}  # fmt: skip

_NAMED = {f"{name}.default": fn for name, fn in _UNARY.items()}
for _name, _fn in _BINARY.items():
    _NAMED |= {f"{_name}.{kind}": _fn for kind in ("Tensor", "Scalar")}

OPERATORS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "hetpipe.keep_mask.default": keep_mask,
    "hetpipe.uniform.default": uniform,
    **{f"aten.{name}": fn for name, fn in {**_NAMED, **_ELEMENTWISE, **_SHAPES, **_OTHER}.items()},
}
