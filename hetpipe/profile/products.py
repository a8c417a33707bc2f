"""The matrix products of operators, from the shapes of their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetpipe.cost.work import ProductShape


def products(name: str, arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """Return the matrix products of the operator `name`; empty for other operators.

    For a backward operator, only the products that `output_mask` requests.
    """
    of = _OPERATORS.get(name)
    return () if of is None else of(arguments, result)


def _plain(arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """mm, bmm, addmm and baddbmm: the last two tensors are the factors."""
    left, right = [each for each in arguments if isinstance(each, torch.Tensor)][-2:]
    batches = left.shape[0] if left.dim() == 3 else 1
    return (ProductShape(batches, left.shape[-2], right.shape[-1], left.shape[-1]),)


def _convolution(arguments: Sequence[Any], result: torch.Tensor) -> tuple[ProductShape, ...]:
    """w (channels x taps) times the patches of x (taps x pixels)."""
    x, weight = arguments[:2]
    return (_pixels_of(x, weight, result, arguments[8]),)


def _convolution_backward(arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """The input's gradient is a convolution the other way; the weight's sums over all pixels."""
    dy, x, weight = arguments[:3]
    transposed, groups = arguments[7], arguments[9]
    want_x, want_weight = arguments[10][:2]
    shapes = [_pixels_of(dy, weight, x, groups)] if want_x else []
    if want_weight:
        inner = x if transposed else dy  # each of its pixels has a window
        pixels = inner.shape[0] * math.prod(inner.shape[2:])
        shapes.append(
            ProductShape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]), pixels)
        )
    return tuple(shapes)


def _pixels_of(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, groups: int) -> ProductShape:
    """Return the product in which every pixel of y sums the taps of all channels of x in its group.

    It also counts for a gradient with strides: taps between windows are multiplied with zeros.
    """
    taps = math.prod(weight.shape[2:])
    pixels = y.shape[0] * math.prod(y.shape[2:])
    return ProductShape(groups, y.shape[1] // groups, pixels, x.shape[1] // groups * taps)


_OPERATORS: Mapping[str, Callable[[Sequence[Any], Any], tuple[ProductShape, ...]]] = {
    "mm": _plain, "bmm": _plain, "addmm": _plain, "baddbmm": _plain,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
}  # fmt: skip
