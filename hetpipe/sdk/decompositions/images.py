"""Pooling of images and volumes, and gradients of resizing and of padding with border elements.

Pooling reads from windows: element k of window o is element `place[o, k]` of a dimension, where
`inside[o, k]` is true.

Resizing is linear and separable: y = M1 x M2^T for two dimensions, where M[o, i] is the share of
input i in output o. Its gradient uses the transposed matrices, as the gradient of a mean does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True)
class Windows:
    """The windows of one dimension: `place` and `inside` [windows, elements], `count` [windows].

    `count` is the divisor of a mean; `size` is the size of the dimension.
    """

    place: Tensor
    inside: Tensor
    count: Tensor
    size: int


def _sliding(
    x: Tensor, dim: int, out: int, kernel: int, stride: int, pad: int, dilation: int, padded: bool
) -> Windows:
    """Return windows of `kernel` elements; with `padded`, `count` includes the border."""
    size = x.shape[dim]
    first = torch.arange(out, device=x.device) * stride - pad
    place = first.unsqueeze(1) + torch.arange(kernel, device=x.device) * dilation
    inside = (place >= 0) & (place < size)
    counted = (place < size + pad) if padded else inside
    return Windows(place, inside, counted.to(torch.int64).sum(1), size)


def _covering(x: Tensor, dim: int, out: int) -> Windows:
    """Return windows that cover the dimension evenly: floor(o n / out) to ceil((o + 1) n / out)."""
    size = x.shape[dim]
    window = torch.arange(out, device=x.device)
    first = torch.div(window * size, out, rounding_mode="floor")
    end = torch.div((window + 1) * size + out - 1, out, rounding_mode="floor")
    longest = max((-(-(o + 1) * size // out) - o * size // out for o in range(out)), default=0)
    place = first.unsqueeze(1) + torch.arange(longest, device=x.device)
    inside = place < end.unsqueeze(1)
    return Windows(place, inside, end - first, size)


def _seen(x: Tensor, windows: Sequence[Windows], outside: float) -> Tensor:
    """Return each window in a new last dimension, with `outside` for elements beyond the border."""
    count = len(windows)
    first = x.dim() - count
    for at, each in enumerate(windows):
        dim = first + 2 * at
        place = each.place.clamp(min=0, max=max(each.size - 1, 0))
        sizes = [*x.shape[:dim], *each.place.shape, *x.shape[dim + 1 :]]
        x = x.index_select(dim, place.reshape(-1)).reshape(sizes)
        mask = each.inside.reshape([*each.inside.shape, *[1] * (x.dim() - dim - 2)])
        x = torch.where(mask, x, outside)
    order = [*range(first), *range(first, x.dim(), 2), *range(first + 1, x.dim(), 2)]
    return x.permute(order).flatten(first + count)


def _largest(x: Tensor, windows: Sequence[Windows]) -> tuple[Tensor, Tensor]:
    """Return the largest element of each window, and its place in x; the first if several tie."""
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    value, which = _seen(x, windows, lowest).max(-1)
    count = len(windows)
    place: Any = 0
    for at, each in enumerate(windows):
        shape = [1] * (2 * count)
        shape[at], shape[count + at] = each.place.shape
        place = place * each.size + each.place.reshape(shape)
    place = place.flatten(count).expand(*which.shape, -1)
    return value, torch.gather(place, -1, which.unsqueeze(-1)).squeeze(-1)


def _mean(x: Tensor, windows: Sequence[Windows], divisor: int | None) -> Tensor:
    total = _seen(x, windows, 0.0).sum(-1)
    if divisor:
        return total / divisor
    for at, each in enumerate(reversed(windows)):
        total = total / each.count.to(x.dtype).reshape([-1, *[1] * at])
    return total


def _mean_backward(gradient: Tensor, windows: Sequence[Windows], divisor: int | None) -> Tensor:
    """Return the gradient of `_mean` with respect to its input."""
    matrices = []
    for each in windows:
        number = torch.arange(each.size, device=gradient.device)
        there = (each.place.unsqueeze(-1) == number) & each.inside.unsqueeze(-1)
        matrix = there.to(gradient.dtype).sum(1)
        if not divisor:
            matrix = matrix / each.count.to(gradient.dtype).unsqueeze(1)
        matrices.append(matrix)
    gradient = _transposed(gradient, matrices)
    return gradient / divisor if divisor else gradient


def _each(value: Any, count: int, default: Sequence[int]) -> list[int]:
    """Return one number per dimension. torch also takes a single number, or [] for the default."""
    items = list(value) if isinstance(value, Sequence) else [value]
    return list(default) if not items else items * count if len(items) == 1 else items


def _pooled(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """Return the number of windows of a dimension."""
    free = size + 2 * pad - dilation * (kernel - 1) - 1
    count = (-(-free // stride) if ceil else free // stride) + 1
    # The last window begins in the tensor or in the border before it.
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _pooling(
    x: Tensor, count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool,
    padded: bool,
) -> list[Windows]:  # fmt: skip
    """Return the windows of the last `count` dimensions."""
    sizes = _each(kernel, count, ())
    settings = zip(
        range(x.dim() - count, x.dim()), sizes, _each(stride, count, sizes),
        _each(padding, count, ()), _each(dilation, count, ()), strict=True,
    )  # fmt: skip
    return [
        _sliding(x, dim, _pooled(x.shape[dim], k, s, p, d, ceil), k, s, p, d, padded)
        for dim, k, s, p, d in settings
    ]


def max_pool3d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the largest element of each window, and its place."""
    return _largest(x, _pooling(x, 3, kernel, stride, padding, dilation, ceil_mode, False))


def avg_pool(
    count: int, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the mean of each window over the last `count` dimensions."""
    windows = _pooling(x, count, kernel, stride, padding, 1, ceil_mode, count_include_pad)
    return _mean(x, windows, divisor_override)


def avg_pool_backward(
    count: int, gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any,
    ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    windows = _pooling(x, count, kernel, stride, padding, 1, ceil_mode, count_include_pad)
    return _mean_backward(gradient, windows, divisor_override)


def _bins(x: Tensor, sizes: Sequence[int]) -> list[Windows]:
    first = x.dim() - len(sizes)
    return [_covering(x, dim, size) for dim, size in enumerate(sizes, first)]


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the largest element of each bin, and its place; the bins cover the input."""
    return _largest(x, _bins(x, output_size))


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Return the mean of each bin; the bins cover the input."""
    return _mean(x, _bins(x, output_size), None)


def adaptive_avg_pool_backward(count: int, gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `adaptive_avg_pool` over the last `count` dimensions."""
    return _mean_backward(gradient, _bins(x, gradient.shape[-count:]), None)


def max_pool_backward(count: int, gradient: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """Add the gradient at the places of the largest elements; windows may share an element.

    The places are the last of the `settings`; the pooling runs over the last `count` dimensions.
    """
    first, places = x.dim() - count, settings[-1]
    zeros = torch.zeros_like(x).flatten(first)
    return zeros.scatter_add(first, places.flatten(first), gradient.flatten(first)).reshape(x.shape)


CUBIC = -0.75
"""The slope of torch's cubic kernel at 1 (Keys 1981)."""


def _sources(like: Tensor, inputs: int, outputs: int, align: bool, scale: float | None) -> Tensor:
    """Return each output's position in the input, which may be outside or between elements."""
    number = torch.arange(outputs, device=like.device).to(like.dtype)
    if align:
        return number * ((inputs - 1) / (outputs - 1) if outputs > 1 else 0.0)
    step = 1 / scale if scale else inputs / outputs
    return (number + 0.5) * step - 0.5


def _linear(like: Tensor, inputs: int, outputs: int, align: bool, scale: float | None) -> Tensor:
    """Return the matrix of a linear interpolation: two neighbours, weighted by distance."""
    at = _sources(like, inputs, outputs, align, scale).clamp(min=0, max=inputs - 1)
    number = torch.arange(inputs, device=like.device).to(like.dtype)
    return (1 - (at.unsqueeze(1) - number.unsqueeze(0)).abs()).clamp(min=0)


def _cubic(like: Tensor, inputs: int, outputs: int, align: bool, scale: float | None) -> Tensor:
    """Return the matrix of a cubic interpolation: four neighbours, clamped to the border."""
    at = _sources(like, inputs, outputs, align, scale)
    first = torch.floor(at)
    number = torch.arange(inputs, device=like.device).to(like.dtype)
    total = torch.zeros(outputs, inputs, dtype=like.dtype, device=like.device)
    for tap in (-1, 0, 1, 2):
        gap = (at - first - tap).abs()
        if tap in (0, 1):
            share = ((CUBIC + 2) * gap - (CUBIC + 3)) * gap * gap + 1
        else:
            share = ((CUBIC * gap - 5 * CUBIC) * gap + 8 * CUBIC) * gap - 4 * CUBIC
        place = (first + tap).clamp(min=0, max=inputs - 1)
        there = place.unsqueeze(1) == number.unsqueeze(0)
        total = total + torch.where(there, share.unsqueeze(1), 0.0)
    return total


def _nearest(
    like: Tensor, inputs: int, outputs: int, scale: float | None, middle: float = 0.0
) -> Tensor:
    """Return the matrix that takes the nearest element; `middle` is 0.5 for torch's exact kind."""
    number = torch.arange(outputs, device=like.device).to(like.dtype)
    step = 1 / scale if scale else inputs / outputs
    return _taking(like, inputs, torch.floor((number + middle) * step).clamp(max=inputs - 1))


def _border(like: Tensor, inputs: int, outputs: int, before: int) -> Tensor:
    """Return the matrix that takes the element itself; outside the input, the border element."""
    at = (torch.arange(outputs, device=like.device) - before).clamp(min=0, max=inputs - 1)
    return _taking(like, inputs, at)


def _taking(like: Tensor, inputs: int, at: Tensor) -> Tensor:
    """Return the matrix whose output o is input `at[o]`."""
    number = torch.arange(inputs, device=like.device).to(at.dtype)
    return (at.unsqueeze(1) == number.unsqueeze(0)).to(like.dtype)


def _transposed(gradient: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return the gradient of the input: multiply each of the last dimensions by its matrix."""
    first = gradient.dim() - len(matrices)
    for dim, matrix in enumerate(matrices, first):
        gradient = torch.matmul(gradient.movedim(dim, -1), matrix).movedim(-1, dim)
    return gradient


def interpolated_backward(
    matrix: Callable[..., Tensor], gradient: Tensor, output_size: Sequence[int],
    input_size: Sequence[int], align_corners: bool, *scales: float | None,
) -> Tensor:  # fmt: skip
    """Return the gradient of a linear or cubic interpolation."""
    sizes = zip(input_size[2:], output_size, scales or [None] * len(output_size), strict=True)
    return _transposed(gradient, [matrix(gradient, i, o, align_corners, s) for i, o, s in sizes])


def nearest_backward(
    middle: float, gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int],
    *scales: float | None,
) -> Tensor:  # fmt: skip
    sizes = zip(input_size[2:], output_size, scales or [None] * len(output_size), strict=True)
    return _transposed(gradient, [_nearest(gradient, i, o, s, middle) for i, o, s in sizes])


def border_backward(gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the gradient of padding with the elements at the border.

    `padding` has two numbers for each dimension, the last dimension first.
    """
    count = len(padding) // 2
    matrices = [
        _border(gradient, x.shape[d], gradient.shape[d], padding[2 * place])
        for place in reversed(range(count))
        for d in [x.dim() - 1 - place]
    ]
    return _transposed(gradient, matrices)


_LINEAR = partial(interpolated_backward, _linear)
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.max_pool3d_with_indices.default: max_pool3d,
    aten.max_pool3d_with_indices_backward.default: partial(max_pool_backward, 3),
    aten.avg_pool2d.default: partial(avg_pool, 2),
    aten.avg_pool2d_backward.default: partial(avg_pool_backward, 2),
    aten.avg_pool3d.default: partial(avg_pool, 3),
    aten.avg_pool3d_backward.default: partial(avg_pool_backward, 3),
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: partial(max_pool_backward, 2),
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d_backward.default: partial(max_pool_backward, 3),
    aten._adaptive_avg_pool2d.default: adaptive_avg_pool,
    aten._adaptive_avg_pool2d_backward.default: partial(adaptive_avg_pool_backward, 2),
    aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
    aten._adaptive_avg_pool3d_backward.default: partial(adaptive_avg_pool_backward, 3),
    aten.upsample_linear1d_backward.default: _LINEAR,
    aten.upsample_bilinear2d_backward.default: _LINEAR,
    aten.upsample_trilinear3d_backward.default: _LINEAR,
    aten.upsample_bicubic2d_backward.default: partial(interpolated_backward, _cubic),
    aten.upsample_nearest1d_backward.default: partial(nearest_backward, 0.0),
    aten.upsample_nearest2d_backward.default: partial(nearest_backward, 0.0),
    aten.upsample_nearest3d_backward.default: partial(nearest_backward, 0.0),
    aten._upsample_nearest_exact1d_backward.default: partial(nearest_backward, 0.5),
    aten._upsample_nearest_exact2d_backward.default: partial(nearest_backward, 0.5),
    aten._upsample_nearest_exact3d_backward.default: partial(nearest_backward, 0.5),
    aten.replication_pad1d_backward.default: border_backward,
    aten.replication_pad2d_backward.default: border_backward,
    aten.replication_pad3d_backward.default: border_backward,
}
