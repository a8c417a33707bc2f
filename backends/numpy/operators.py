"""A table: operator name -> numpy function with the operator's arguments.

The device casts every result to the dtype that the graph declares, so functions leave dtypes to
numpy's promotion, and ignore arguments about layout, memory or dtype (`**_`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .functions import (
    Array,
    convolution,
    convolution_backward,
    keep_mask,
    lstm,
    lstm_backward,
    max_pool2d,
    uniform,
)


def _reduction(fn: Callable[..., Any]) -> Callable[..., Any]:
    def reduced(x: Array, dims: Any = None, keepdim: bool = False, **_: Any) -> Any:
        axes = (tuple(dims) or None) if isinstance(dims, list) else dims
        # torch accepts dimension 0 of a 0-d tensor, numpy does not.
        return fn(x, axis=axes if x.ndim else None, keepdims=keepdim)

    return reduced


def _var_mean(x: Array, dims: Any = None, correction: Any = None, keepdim: bool = False) -> Any:
    variance = functools.partial(np.var, ddof=1 if correction is None else correction)
    return tuple(_reduction(fn)(x, dims, keepdim) for fn in (variance, np.mean))


def _places(indices: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(slice(None) if index is None else index for index in indices)


def _along(index: Array, dim: int) -> tuple[Array, ...]:
    """Return, for each dimension, the indices of the elements that `index` selects along `dim`."""
    indices: list[Array] = list(np.indices(index.shape, sparse=True))
    indices[dim] = index
    return tuple(indices)


def _gather(x: Array, dim: int, index: Array, **_: Any) -> Array:
    if index.size == 0:  # an empty index may have any rank
        return np.empty(index.shape, x.dtype)
    picked = np.atleast_1d(x)[_along(np.atleast_1d(index), dim)]
    return picked.reshape(index.shape)


def _index_select(x: Array, dim: int, index: Array) -> Array:
    return np.take(x, index, dim) if x.ndim else x


def _scatter(
    x: Array, dim: int, index: Array, value: Array | float, accumulate: bool = False
) -> Array:
    index = np.atleast_1d(index)
    if np.ndim(value):
        value = np.asarray(value)[tuple(map(slice, index.shape))]
    return _put(np.atleast_1d(x), _along(index, dim), value, accumulate).reshape(x.shape)


def _as_strided(
    x: Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Array:
    flat = np.ascontiguousarray(x).reshape(-1)[storage_offset or 0 :]  # copies an expanded view
    steps = [step * flat.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(flat, size, steps, writeable=False)


def _cat(tensors: Sequence[Array], dim: int = 0) -> Array:
    """Join tensors; like torch, ignore empty vectors among tensors of another rank."""
    rank = max(x.ndim for x in tensors)
    return np.concatenate([x for x in tensors if x.ndim == rank or x.size], dim)


def _put(x: Array, indices: Sequence[Any], value: Any, accumulate: bool = False) -> Array:
    put: Any = np.add.at if accumulate else operator.setitem
    put(y := x.copy(), _places(indices), value)
    return y


def _scatter_reduce(
    x: Array, dim: int, index: Array, source: Array, reduce: str, include_self: bool = True
) -> Array:
    y, index = np.atleast_1d(x).copy(), np.atleast_1d(index)
    places = _along(index, dim)
    if not include_self:
        least, most = _limits(y.dtype)
        y[places] = {"prod": 1, "amax": least, "amin": most}.get(reduce, 0)
    into: Any = REDUCE[reduce]
    into.at(y, places, np.atleast_1d(source)[tuple(map(slice, index.shape))])
    if reduce == "mean":
        counts = np.full(y.shape, int(include_self))
        np.add.at(counts, places, 1)
        divide = np.divide if y.dtype.kind == "f" else np.floor_divide
        y = divide(y, counts.clip(1))
    return y.reshape(x.shape)


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the least and the largest value of a dtype."""
    if dtype.kind in "fb":
        return (-math.inf, math.inf) if dtype.kind == "f" else (False, True)
    return np.iinfo(dtype).min, np.iinfo(dtype).max


def _pad(x: Array, widths: Sequence[int], value: float = 0) -> Array:
    """Pad the last dimensions; `widths` begins with the last dimension. Negative widths cut."""
    pairs = [(0, 0)] * x.ndim
    for place in range(len(widths) // 2):
        pairs[-1 - place] = (widths[2 * place], widths[2 * place + 1])
    padded = np.pad(x, [(max(a, 0), max(b, 0)) for a, b in pairs], constant_values=value)
    return padded[tuple(slice(max(-a, 0), b if b < 0 else None) for a, b in pairs)]


def _lgamma(x: float) -> float:
    try:
        return math.lgamma(x)
    except (ValueError, OverflowError):  # a pole, or a result out of range
        return math.inf


REDUCE = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "amax": np.maximum, "amin": np.minimum
}  # fmt: skip
DIVIDE: Any = {None: np.divide, "floor": np.floor_divide, "trunc": lambda a, b: np.trunc(a / b)}
NUMPY = """abs bitwise_not ceil cos cosh diagonal exp exp2 expm1 flip floor fmax fmin isinf isnan
log log10 log1p log2 logical_and logical_not logical_or logical_xor maximum minimum nextafter
reciprocal round sign sin sinh sqrt tan tanh trunc"""
INVERSES = "acos acosh asin asinh atan atan2 atanh"
BINARY = "eq ne lt le gt ge mul bitwise_and bitwise_or bitwise_xor fmod remainder"
REDUCTIONS = """amax.default amin.default any.default any.dim any.dims argmax.default argmin.default
max.default mean.default mean.dim min.default prod.default prod.dim_int
sum.default sum.dim_IntList"""

TABLE: dict[str, Callable[..., Any]] = {
    **{f"{name}.default": getattr(np, name) for name in NUMPY.split()},
    **{f"{n}.Tensor {n}.Scalar": vars(operator).get(n) or vars(np)[n] for n in BINARY.split()},
    **{f"{name}.default": getattr(np, f"arc{name[1:]}") for name in INVERSES.split()},
    **{name: _reduction(getattr(np, name.split(".")[0])) for name in REDUCTIONS.split()},
    "_to_copy.default alias.default clone.default lift_fresh_copy.default": lambda x, **_: x,
    "neg.default": np.negative,
    "rsqrt.default": lambda x: 1 / np.sqrt(x),
    "erf.default": np.frompyfunc(math.erf, 1, 1),
    "erfc.default": np.frompyfunc(math.erfc, 1, 1),
    "lgamma.default": np.frompyfunc(_lgamma, 1, 1),
    "copysign.Tensor": np.copysign,
    "sigmoid.default": lambda x: 1 / (1 + np.exp(-x)),
    "relu.default": lambda x: np.maximum(x, 0),
    "clamp.default clamp.Tensor": lambda x, low=None, high=None: np.clip(x, low, high),
    "add.Tensor add.Scalar": lambda a, b, alpha=1: a + alpha * b,
    "sub.Tensor sub.Scalar": lambda a, b, alpha=1: a - alpha * b,
    "div.Tensor div.Scalar": np.divide,
    "div.Tensor_mode div.Scalar_mode": lambda a, b, rounding_mode: DIVIDE[rounding_mode](a, b),
    "pow.Tensor_Tensor pow.Tensor_Scalar pow.Scalar": np.power,
    "where.self": np.where,
    "view.default": np.reshape,
    "permute.default t.default": np.transpose,
    "expand.default": lambda x, n, **_: np.broadcast_arrays(x, np.empty([abs(i) for i in n]))[0],
    "squeeze.dims": lambda x, dims: x.squeeze(tuple(d for d in dims if x.ndim and x.shape[d] == 1)),
    "unsqueeze.default": np.expand_dims,
    "select.int": lambda x, dim, index: np.take(x, index, dim),
    "slice.Tensor": lambda x, dim=0, start=None, end=None, step=1: x[
        (slice(None),) * (dim % x.ndim) + (slice(start, end, step),)
    ],
    "split_with_sizes.default": lambda x, n, dim=0: np.split(x, np.cumsum(n)[:-1], dim),
    "cat.default": _cat,
    "repeat.default": np.tile,
    "constant_pad_nd.default": _pad,
    "copy.default": lambda x, source: np.broadcast_to(source, x.shape),
    "fill.Scalar fill.Tensor": lambda x, value: np.full(x.shape, np.reshape(value, ())),
    "as_strided.default": _as_strided,
    "index.Tensor": lambda x, indices: x[_places(indices)],
    "index_put.default": _put,
    "index_select.default": _index_select,
    "embedding.default": lambda weight, index, *_: weight[index],
    "gather.default": _gather,
    "scatter.value scatter.src": _scatter,
    "scatter_reduce.two": _scatter_reduce,
    "scatter_add.default": functools.partial(_scatter, accumulate=True),
    "empty.memory_format empty_permuted.default": lambda size, *_, **__: np.zeros(size),
    "full.default": lambda size, value, **_: np.full(size, value),
    "full_like.default": lambda x, value, **_: np.full(x.shape, value),
    "zeros_like.default": lambda x, **_: np.zeros(x.shape),
    "scalar_tensor.default": lambda value, **_: value,
    "arange.start_step": lambda start, end, step=1, **_: np.arange(start, end, step),
    "max.dim": lambda x, *how: (_reduction(np.max)(x, *how), _reduction(np.argmax)(x, *how)),
    "min.dim": lambda x, *how: (_reduction(np.min)(x, *how), _reduction(np.argmin)(x, *how)),
    "var.correction": lambda *args, **how: _var_mean(*args, **how)[0],
    "var_mean.correction": _var_mean,
    "cumsum.default": lambda x, dim, **_: np.cumsum(x, dim) if x.ndim else x,
    "mm.default bmm.default": np.matmul,
    "addmm.default": lambda c, a, b, beta=1, alpha=1: beta * c + alpha * (a @ b),
    "convolution.default": convolution,
    "convolution_backward.default": convolution_backward,
    "max_pool2d_with_indices.default": max_pool2d,
}
OPERATORS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "hetpipe.keep_mask.default": keep_mask,
    "hetpipe.uniform.default": uniform,
    "hetpipe.lstm.default": lstm,
    "hetpipe.lstm_backward.default": lstm_backward,
    **{f"aten.{name}": fn for names, fn in TABLE.items() for name in names.split()},
}
