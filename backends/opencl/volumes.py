"""Windows over any number of dimensions, and convolutions of volumes as sums of those of images.

A pooling reads element `place[o, k]` of a dimension as the k-th of window o, where it is inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


@dataclass(frozen=True)
class Windows:
    """The windows of one dimension: `place` and `inside`, [windows, elements]; `count` of each."""

    place: Tensor
    inside: Tensor
    count: Tensor
    size: int


def _sliding(
    x: Tensor, dim: int, out: int, kernel: int, stride: int, pad: int, dilation: int, padded: bool
) -> Windows:
    """Windows of `kernel` elements; with `padded` those of the border count, too."""
    size = x.shape[dim]
    first = torch.arange(out, device=x.device) * stride - pad
    place = first.unsqueeze(1) + torch.arange(kernel, device=x.device) * dilation
    inside = (place >= 0) & (place < size)
    counted = (place < size + pad) if padded else inside
    return Windows(place, inside, counted.to(torch.int64).sum(1), size)


def _covering(x: Tensor, dim: int, out: int) -> Windows:
    """Windows that cover the dimension evenly, from floor(o n / out) to ceil((o + 1) n / out)."""
    size = x.shape[dim]
    window = torch.arange(out, device=x.device)
    first = torch.div(window * size, out, rounding_mode="floor")
    end = torch.div((window + 1) * size + out - 1, out, rounding_mode="floor")
    longest = max((-(-(o + 1) * size // out) - o * size // out for o in range(out)), default=0)
    place = first.unsqueeze(1) + torch.arange(longest, device=x.device)
    inside = place < end.unsqueeze(1)
    return Windows(place, inside, end - first, size)


def _seen(x: Tensor, windows: Sequence[Windows], outside: float) -> Tensor:
    """The elements of each window in the last dimension, `outside` where there is none."""
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
    """The largest element of each window, the first of equal ones, and its place in the volume."""
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
    """The gradient by the input: times a matrix for each dimension, as `resized` has them."""
    first = gradient.dim() - len(windows)
    for dim, each in enumerate(windows, first):
        number = torch.arange(each.size, device=gradient.device)
        there = (each.place.unsqueeze(-1) == number) & each.inside.unsqueeze(-1)
        matrix = there.to(gradient.dtype).sum(1)
        if not divisor:
            matrix = matrix / each.count.to(gradient.dtype).unsqueeze(1)
        gradient = torch.matmul(gradient.movedim(dim, -1), matrix).movedim(-1, dim)
    return gradient / divisor if divisor else gradient


def _each(value: Any, count: int, default: Sequence[int]) -> list[int]:
    """torch accepts one number, one in a list, all of them, or an empty list for the default."""
    items = list(value) if isinstance(value, Sequence) else [value]
    return list(default) if not items else items * count if len(items) == 1 else items


def _pooled(size: int, kernel: int, stride: int, pad: int, dilation: int, ceil: bool) -> int:
    """How many windows a dimension has."""
    free = size + 2 * pad - dilation * (kernel - 1) - 1
    count = (-(-free // stride) if ceil else free // stride) + 1
    # The last window begins inside, or in the border before.
    return count - 1 if ceil and (count - 1) * stride >= size + pad else count


def _pooling(
    x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool, padded: bool
) -> list[Windows]:
    count = 3
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
    """The largest elements of windows, and their places."""
    return _largest(x, _pooling(x, kernel, stride, padding, dilation, ceil_mode, False))


def avg_pool3d(
    x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Means of windows."""
    windows = _pooling(x, kernel, stride, padding, 1, ceil_mode, count_include_pad)
    return _mean(x, windows, divisor_override)


def avg_pool3d_backward(
    gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Tensor:  # fmt: skip
    """The gradient of means of windows."""
    windows = _pooling(x, kernel, stride, padding, 1, ceil_mode, count_include_pad)
    return _mean_backward(gradient, windows, divisor_override)


def _bins(x: Tensor, sizes: Sequence[int]) -> list[Windows]:
    first = x.dim() - len(sizes)
    return [_covering(x, dim, size) for dim, size in enumerate(sizes, first)]


def adaptive_max_pool(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The largest elements of bins that cover the volume, and their places."""
    return _largest(x, _bins(x, output_size))


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Means of bins that cover the volume."""
    return _mean(x, _bins(x, output_size), None)


def adaptive_avg_pool3d_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of means of bins."""
    return _mean_backward(gradient, _bins(x, gradient.shape[-3:]), None)


def _put_back(gradient: Tensor, x: Tensor, places: Tensor, count: int) -> Tensor:
    """The gradient at the places of the largest elements, summed where windows share one."""
    first = x.dim() - count
    zeros = torch.zeros_like(x).flatten(first)
    return zeros.scatter_add(first, places.flatten(first), gradient.flatten(first)).reshape(x.shape)


def max_pool3d_backward(
    gradient: Tensor, x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, places: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of the largest elements of windows."""
    return _put_back(gradient, x, places, 3)


def adaptive_max_pool2d_backward(gradient: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """The gradient of the largest elements of bins of an image."""
    return _put_back(gradient, x, places, 2)


def adaptive_max_pool3d_backward(gradient: Tensor, x: Tensor, places: Tensor) -> Tensor:
    """The gradient of the largest elements of bins of a volume."""
    return _put_back(gradient, x, places, 3)


@dataclass(frozen=True)
class _Slabs:
    """How the first of three dimensions meets a kernel: element k reads every `stride`th slab."""

    stride: int
    padding: int
    dilation: int
    transposed: bool

    def of(self, volume: Tensor, at: int, count: int) -> Tensor:
        """Slabs that element `at` of the kernel reads, of a volume with its border."""
        first = at * self.dilation
        return volume[:, :, first : first + (count - 1) * self.stride + 1 : self.stride]


def _images(volume: Tensor) -> Tensor:
    """[N, C, D, H, W] as N * D images."""
    return volume.movedim(2, 1).flatten(0, 1)


def _volume(images: Tensor, depth: int) -> Tensor:
    return images.reshape(-1, depth, *images.shape[1:]).movedim(1, 2)


def _flat(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """The settings of the convolutions of images."""
    stride, padding, dilation = (list(each)[1:] for each in (stride, padding, dilation))
    return (stride, padding, dilation, transposed, list(output_padding)[1:], groups)


def _padded(volume: Tensor, before: int, after: int) -> Tensor:
    padded: Tensor = aten.constant_pad_nd(volume, [0, 0, 0, 0, before, after])
    return padded


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Of volumes: the sum over the kernel's slabs of convolutions of images."""
    if x.dim() != 5:
        return NotImplemented
    slabs = _Slabs(stride[0], padding[0], dilation[0], transposed)
    flat = _flat(stride, padding, dilation, transposed, output_padding, groups)
    depth, kernel = x.shape[2], weight.shape[2]
    reach = dilation[0] * (kernel - 1) + 1
    total: Any = 0
    if not transposed:
        volume = _padded(x, padding[0], padding[0])
        count = (volume.shape[2] - reach) // stride[0] + 1
        for at in range(kernel):
            images = _images(slabs.of(volume, at, count))
            total = total + aten.convolution(images, weight[:, :, at], None, *flat)
        result = _volume(total, count)
    else:
        whole = (depth - 1) * stride[0] + reach
        for at in range(kernel):
            part = _volume(aten.convolution(_images(x), weight[:, :, at], None, *flat), depth)
            first = at * dilation[0]
            room = part.new_zeros([*part.shape[:2], whole, *part.shape[3:]])
            end = first + (depth - 1) * stride[0] + 1
            total = total + aten.slice_scatter(room, part, 2, first, end, stride[0])
        count = whole - 2 * padding[0] + output_padding[0]
        result = _padded(total, 0, output_padding[0])[:, :, padding[0] : padding[0] + count]
    return result if bias is None else result + bias.reshape(-1, 1, 1, 1)


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """The gradients of `convolution` by volume, weight and bias."""
    if x.dim() != 5:
        return NotImplemented
    slabs = _Slabs(stride[0], padding[0], dilation[0], transposed)
    flat = _flat(stride, padding, dilation, transposed, output_padding, groups)
    few, many = (x, gradient) if transposed else (gradient, x)  # slabs of one, windows of the other
    count, kernel = few.shape[2], weight.shape[2]
    reach = (count - 1) * stride[0] + dilation[0] * (kernel - 1) + 1
    before = padding[0]
    volume = _padded(many, before, max(0, reach - many.shape[2] - before))
    by_x: Any = 0
    by_weight = []
    for at in range(kernel):
        window = _images(slabs.of(volume, at, count))
        ends = (window, _images(few)) if transposed else (_images(few), window)
        wanted = [mask[0], mask[1], False]
        found = aten.convolution_backward(*ends, weight[:, :, at], None, *flat, wanted)
        by_weight.append(found[1])
        if mask[0]:
            part = _volume(found[0], count)
            if not transposed:
                room = part.new_zeros([*part.shape[:2], *volume.shape[2:]])
                first = at * dilation[0]
                end = first + (count - 1) * stride[0] + 1
                part = aten.slice_scatter(room, part, 2, first, end, stride[0])
            by_x = by_x + part
    if mask[0] and not transposed:
        by_x = by_x[:, :, before : before + x.shape[2]]
    return (
        by_x if mask[0] else None,
        torch.stack(by_weight, 2) if mask[1] else None,
        gradient.sum([0, 2, 3, 4]) if mask[2] else None,
    )


VOLUMES: Mapping[Any, Callable[..., Any]] = {
    aten.max_pool3d_with_indices.default: max_pool3d,
    aten.max_pool3d_with_indices_backward.default: max_pool3d_backward,
    aten.avg_pool3d.default: avg_pool3d,
    aten.avg_pool3d_backward.default: avg_pool3d_backward,
    aten.adaptive_max_pool2d.default: adaptive_max_pool,
    aten.adaptive_max_pool2d_backward.default: adaptive_max_pool2d_backward,
    aten.adaptive_max_pool3d.default: adaptive_max_pool,
    aten.adaptive_max_pool3d_backward.default: adaptive_max_pool3d_backward,
    aten._adaptive_avg_pool3d.default: adaptive_avg_pool,
    aten._adaptive_avg_pool3d_backward.default: adaptive_avg_pool3d_backward,
}
"""Decompositions by operator."""
CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
"""Of operators that have a kernel of their own: what that kernel does not take."""
