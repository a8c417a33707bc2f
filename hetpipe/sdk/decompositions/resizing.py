"""Gradients of resizing and of padding by the border, as products with a matrix for each dimension.

Such an operator is linear and separable: y = M1 x M2^T for two dimensions, where M[o, i] is the
share of input i in output o. Its gradient takes the transposed matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor
CUBIC = -0.75
"""The slope of torch's cubic kernel at 1 (Keys 1981)."""


def _sources(like: Tensor, inputs: int, outputs: int, align: bool, scale: float | None) -> Tensor:
    """Return the position in the input of each output; it may be outside or between elements."""
    number = torch.arange(outputs, device=like.device).to(like.dtype)
    if align:
        return number * ((inputs - 1) / (outputs - 1) if outputs > 1 else 0.0)
    step = 1 / scale if scale else inputs / outputs
    return (number + 0.5) * step - 0.5


def _linear(like: Tensor, inputs: int, outputs: int, align: bool, scale: float | None) -> Tensor:
    """Return the matrix of a linear interpolation: two neighbours, by their distance."""
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
    """Return the matrix that takes the nearest element."""
    number = torch.arange(outputs, device=like.device).to(like.dtype)
    step = 1 / scale if scale else inputs / outputs
    at = torch.floor((number + middle) * step).clamp(max=inputs - 1)
    number = torch.arange(inputs, device=like.device).to(like.dtype)
    return (at.unsqueeze(1) == number.unsqueeze(0)).to(like.dtype)


def _border(like: Tensor, inputs: int, outputs: int, before: int) -> Tensor:
    """Return the matrix that takes the element itself, outside the element at the border."""
    at = (torch.arange(outputs, device=like.device) - before).clamp(min=0, max=inputs - 1)
    number = torch.arange(inputs, device=like.device)
    return (at.unsqueeze(1) == number.unsqueeze(0)).to(like.dtype)


def _transposed(gradient: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Return the gradient by the input: each of the last dimensions times its matrix."""
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
    """Return the gradient of taking the nearest element."""
    sizes = zip(input_size[2:], output_size, scales or [None] * len(output_size), strict=True)
    return _transposed(gradient, [_nearest(gradient, i, o, s, middle) for i, o, s in sizes])


def border_backward(gradient: Tensor, x: Tensor, padding: Sequence[int]) -> Tensor:
    """Return the gradient of padding by the border.

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
"""Decompositions by operator."""
