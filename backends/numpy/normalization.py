# mypy: disable-error-code="no-any-return"
# (numpy's functions return Any)
"""Softmax and the normalisations, forward and backward.

One routine serves batch, layer and group norm: they differ in the axes that share statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Mask = Sequence[bool]


def _statistics(x: Array, axes: tuple[int, ...], eps: float) -> tuple[Array, Array, Array]:
    """Mean, biased variance and 1 / sqrt(variance + eps) over `axes`, which stay as size 1."""
    mean = x.mean(axis=axes, keepdims=True)
    variance = np.square(x - mean).mean(axis=axes, keepdims=True)
    return mean, variance, 1 / np.sqrt(variance + np.asarray(eps, x.dtype))


def _gradient(g: Array, x: Array, mean: Array, invstd: Array, axes: tuple[int, ...]) -> Array:
    """Gradient of (x - mean) * invstd given that of its result, statistics over `axes`."""
    xhat = (x - mean) * invstd
    centred = g - g.mean(axis=axes, keepdims=True)
    return (centred - xhat * (g * xhat).mean(axis=axes, keepdims=True)) * invstd


def _affine(y: Array, weight: Array | None, bias: Array | None, shape: Sequence[int]) -> Array:
    y = y if weight is None else y * weight.reshape(shape)
    return y if bias is None else y + bias.reshape(shape)


def _channel_shape(x: Array) -> tuple[int, ...]:
    return (1, x.shape[1], *(1,) * (x.ndim - 2))


def _batch_norm(
    x: Array, weight: Array | None, bias: Array | None,
    running_mean: Array | None, running_var: Array | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Array, ...]:  # fmt: skip
    """y, saved mean, saved 1/std, new running mean, new running variance; channels on axis 1."""
    shape, axes = _channel_shape(x), (0, *range(2, x.ndim))
    if not training:
        assert running_mean is not None
        assert running_var is not None
        invstd = 1 / np.sqrt(running_var + np.asarray(eps, x.dtype))
        y = (x - running_mean.reshape(shape)) * invstd.reshape(shape)
        empty = np.zeros(0, x.dtype)
        return _affine(y, weight, bias, shape), empty, empty, running_mean, running_var
    mean, variance, invstd = _statistics(x, axes, eps)
    y = _affine((x - mean) * invstd, weight, bias, shape)
    mean, variance, invstd = mean.ravel(), variance.ravel(), invstd.ravel()
    if running_mean is None or running_var is None:
        return y, mean, invstd, mean, variance
    count = x.size // x.shape[1]
    unbiased = variance * (count / max(count - 1, 1))
    new_mean = running_mean + momentum * (mean - running_mean)
    return y, mean, invstd, new_mean, running_var + momentum * (unbiased - running_var)


def _batch_norm_backward(
    dy: Array, x: Array, weight: Array | None, running_mean: Array, running_var: Array,
    save_mean: Array, save_invstd: Array, training: bool, eps: float, mask: Mask,
) -> tuple[Array, Array, Array]:  # fmt: skip
    shape, axes = _channel_shape(x), (0, *range(2, x.ndim))
    mean = (save_mean if training else running_mean).reshape(shape)
    invstd = (
        save_invstd if training else 1 / np.sqrt(running_var + np.asarray(eps, x.dtype))
    ).reshape(shape)
    g = _affine(dy, weight, None, shape)
    dx = _gradient(g, x, mean, invstd, axes) if training else g * invstd
    return dx, (dy * (x - mean) * invstd).sum(axis=axes), dy.sum(axis=axes)


def _layer_norm(
    x: Array, shape: Sequence[int], weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, ...]:
    mean, _, invstd = _statistics(x, tuple(range(-len(shape), 0)), eps)
    return _affine((x - mean) * invstd, weight, bias, shape), mean, invstd


def _layer_norm_backward(
    dy: Array, x: Array, shape: Sequence[int], mean: Array, invstd: Array,
    weight: Array | None, bias: Array | None, mask: Mask,
) -> tuple[Array | None, ...]:  # fmt: skip
    outer, inner = tuple(range(x.ndim - len(shape))), tuple(range(-len(shape), 0))
    dx = _gradient(_affine(dy, weight, None, shape), x, mean, invstd, inner)
    dw = (dy * (x - mean) * invstd).sum(axis=outer)
    return tuple(g if m else None for g, m in zip((dx, dw, dy.sum(axis=outer)), mask, strict=True))


def _group_norm(
    x: Array, weight: Array | None, bias: Array | None,
    n: int, c: int, hw: int, groups: int, eps: float,
) -> tuple[Array, ...]:  # fmt: skip
    grouped = x.reshape(n, groups, -1)
    mean, _, invstd = _statistics(grouped, (2,), eps)
    y = _affine(((grouped - mean) * invstd).reshape(n, c, hw), weight, bias, (1, c, 1))
    return y.reshape(x.shape), mean[..., 0], invstd[..., 0]


def _group_norm_backward(
    dy: Array, x: Array, mean: Array, invstd: Array, weight: Array | None,
    n: int, c: int, hw: int, groups: int, mask: Mask,
) -> tuple[Array | None, ...]:  # fmt: skip
    g = _affine(dy.reshape(n, c, hw), weight, None, (1, c, 1)).reshape(n, groups, -1)
    grouped, mean, invstd = x.reshape(n, groups, -1), mean[..., None], invstd[..., None]
    dx = _gradient(g, grouped, mean, invstd, (2,)).reshape(x.shape)
    xhat, flat = ((grouped - mean) * invstd).reshape(n, c, hw), dy.reshape(n, c, hw)
    grads = (dx, (flat * xhat).sum(axis=(0, 2)), flat.sum(axis=(0, 2)))
    return tuple(g if m else None for g, m in zip(grads, mask, strict=True))


def _log_softmax(x: Array, dim: int, *_: Any) -> Array:
    shifted = x - x.max(axis=dim, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=dim, keepdims=True))


def _softmax(x: Array, dim: int, *_: Any) -> Array:
    e = np.exp(x - x.max(axis=dim, keepdims=True))
    return e / e.sum(axis=dim, keepdims=True)


def _softmax_backward(dy: Array, y: Array, dim: int, *_: Any) -> Array:
    return y * (dy - (dy * y).sum(axis=dim, keepdims=True))


def _log_softmax_backward(dy: Array, y: Array, dim: int, *_: Any) -> Array:
    return dy - np.exp(y) * dy.sum(axis=dim, keepdims=True)


def _without_running(x: Array, w: Any, b: Any, *rest: Any) -> tuple[Array, ...]:
    return _batch_norm(x, w, b, None, None, *rest)[:3]


def _impure(*args: Any) -> tuple[Array, ...]:
    """Without the new running statistics, which the caller of this form does not get."""
    return _batch_norm(*args)[:3]


def _inference(x: Array, w: Any, b: Any, mean: Array, var: Array, *rest: Any) -> tuple[Array, ...]:
    return _batch_norm(x, w, b, mean, var, False, *rest)[:3]


OPERATORS: dict[str, Callable[..., Any]] = {
    "_native_batch_norm_legit_functional.default": _batch_norm,
    "native_batch_norm.default": _impure,
    "_native_batch_norm_legit.no_stats": _without_running,
    "_native_batch_norm_legit_no_training.default": _inference,
    "native_batch_norm_backward.default": _batch_norm_backward,
    "native_layer_norm.default": _layer_norm,
    "native_layer_norm_backward.default": _layer_norm_backward,
    "native_group_norm.default": _group_norm,
    "native_group_norm_backward.default": _group_norm_backward,
    "_softmax.default": _softmax,
    "_log_softmax.default": _log_softmax,
    "_softmax_backward_data.default": _softmax_backward,
    "_log_softmax_backward_data.default": _log_softmax_backward,
}
