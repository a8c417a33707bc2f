"""Convolutions of volumes, as sums of convolutions of slabs: a slab is the image at one depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


def _slabs(volume: Tensor, first: int, count: int, stride: int) -> Tensor:
    """Return the slabs of a padded volume, `stride` apart, that one slab of the kernel reads."""
    return volume[:, :, first : first + (count - 1) * stride + 1 : stride]


def _spread(slabs: Tensor, first: int, depth: int, stride: int) -> Tensor:
    """Return a volume with the slabs where `_slabs` would read them, and zeros elsewhere."""
    room = slabs.new_zeros([*slabs.shape[:2], depth, *slabs.shape[3:]])
    end = first + (slabs.shape[2] - 1) * stride + 1
    spread: Tensor = aten.slice_scatter(room, slabs, 2, first, end, stride)
    return spread


def _images(volume: Tensor) -> Tensor:
    """Return a volume [N, C, D, H, W] as N * D images."""
    return volume.movedim(2, 1).flatten(0, 1)


def _volume(images: Tensor, depth: int) -> Tensor:
    return images.reshape(-1, depth, *images.shape[1:]).movedim(1, 2)


def _flat(
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return the settings for convolutions of images: drop the numbers for the depth."""
    stride, padding, dilation = (list(each)[1:] for each in (stride, padding, dilation))
    return (stride, padding, dilation, transposed, list(output_padding)[1:], groups)


def _padded(volume: Tensor, before: int, after: int) -> Tensor:
    padded: Tensor = aten.constant_pad_nd(volume, [0, 0, 0, 0, before, after])
    return padded


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
) -> Any:  # fmt: skip
    """Convolve volumes: add up one convolution of slabs for each slab of the kernel."""
    if x.dim() != 5:
        return NotImplemented
    flat = _flat(stride, padding, dilation, transposed, output_padding, groups)
    depth, kernel = x.shape[2], weight.shape[2]
    reach = dilation[0] * (kernel - 1) + 1
    total: Any = 0
    if not transposed:
        volume = _padded(x, padding[0], padding[0])
        count = (volume.shape[2] - reach) // stride[0] + 1
        for at in range(kernel):
            images = _images(_slabs(volume, at * dilation[0], count, stride[0]))
            total = total + aten.convolution(images, weight[:, :, at], None, *flat)
        result = _volume(total, count)
    else:
        whole = (depth - 1) * stride[0] + reach
        for at in range(kernel):
            part = _volume(aten.convolution(_images(x), weight[:, :, at], None, *flat), depth)
            total = total + _spread(part, at * dilation[0], whole, stride[0])
        count = whole - 2 * padding[0] + output_padding[0]
        result = _padded(total, 0, output_padding[0])[:, :, padding[0] : padding[0] + count]
    return result if bias is None else result + bias.reshape(-1, 1, 1, 1)


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, mask: Sequence[bool],
) -> Any:  # fmt: skip
    """Return the gradients of `convolution` with respect to volume, weight and bias."""
    if x.dim() != 5:
        return NotImplemented
    flat = _flat(stride, padding, dilation, transposed, output_padding, groups)
    # Each slab of the kernel pairs the slabs of `few` with slabs of `many`, `stride` apart.
    few, many = (x, gradient) if transposed else (gradient, x)
    count, kernel = few.shape[2], weight.shape[2]
    reach = (count - 1) * stride[0] + dilation[0] * (kernel - 1) + 1
    before = padding[0]
    volume = _padded(many, before, max(0, reach - many.shape[2] - before))
    by_x: Any = 0
    by_weight = []
    for at in range(kernel):
        window = _images(_slabs(volume, at * dilation[0], count, stride[0]))
        ends = (window, _images(few)) if transposed else (_images(few), window)
        wanted = [mask[0], mask[1], False]
        found = aten.convolution_backward(*ends, weight[:, :, at], None, *flat, wanted)
        by_weight.append(found[1])
        if mask[0]:
            part = _volume(found[0], count)
            if not transposed:
                part = _spread(part, at * dilation[0], volume.shape[2], stride[0])
            by_x = by_x + part
    if mask[0] and not transposed:
        by_x = by_x[:, :, before : before + x.shape[2]]
    return (
        by_x if mask[0] else None,
        torch.stack(by_weight, 2) if mask[1] else None,
        gradient.sum([0, 2, 3, 4]) if mask[2] else None,
    )


VOLUME_CONVOLUTIONS: Mapping[Any, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
}
"""Decompositions for a device that convolves only images. Convolutions of images stay whole."""
