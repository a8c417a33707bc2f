"""Cases of convolutions and pooling, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hetpipe.conformance.cases.case import aten, grads, table

case = table("convolution")


def conv(**how: Any) -> Callable[..., Any]:
    return grads(lambda x, w, b: F.conv2d(x, w, b, **how), 3)


case("conv", conv(), "2x3x6x5 4x3x3x3 4 2x4x4x3", terms=27)
case("conv_pad_stride", conv(padding=1, stride=2), "2x3x7x6 4x3x3x3 4 2x4x4x3", terms=36)
case("conv_1x1", conv(), "2x3x4x4 5x3x1x1 5 2x5x4x4", terms=32)
case("conv_one_pixel", conv(padding=1), "1x1x1x1 1x1x3x3 1 1x1x1x1", terms=9)
case("conv_groups", conv(groups=2, padding=1), "2x4x5x5 6x2x3x3 6 2x6x5x5", terms=50)
case("conv_depthwise", conv(groups=3, padding=1, stride=2), "2x3x5x5 3x1x3x3 3 2x3x3x3", terms=18)
case("conv_dilated", conv(dilation=2, padding=2), "1x2x6x6 3x2x3x3 3 1x3x6x6", terms=36)
case("conv_rectangle", conv(stride=(1, 2), padding=(0, 2)), "1x2x5x6 2x2x1x4 2 1x2x5x4", terms=20)
case("conv_no_bias", grads(lambda x, w: F.conv2d(x, w), 2), "1x2x4x4 2x2x2x2 1x2x3x3", terms=9)
case(
    "conv_weight_only",
    lambda dy, x, w: aten.convolution_backward(
        dy, x, w, [3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]
    )[1:],
    "2x3x4x4 2x2x4x4 3x2x3x3",
    terms=32,
)
case(
    "conv1d",
    grads(lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), 3),
    "2x3x8 4x3x3 4 2x4x4",
    terms=9,
)
case("conv3d", grads(lambda x, w: F.conv3d(x, w), 2), "1x2x3x3x3 2x2x2x2x2 1x2x2x2x2", terms=16)
case(
    "conv_transposed",
    grads(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1), 3),
    "2x4x3x4 4x3x3x3 3 2x3x6x8",
    terms=96,
)
case("conv_large", conv(padding=1), "4x16x8x8 32x16x3x3 32 4x32x8x8", terms=256, large=True)


def pool(fn: Callable[..., torch.Tensor], *args: Any, **how: Any) -> Callable[..., Any]:
    return grads(lambda x: fn(x, *args, **how), 1)


case("max_pool", pool(F.max_pool2d, 2), "2x3x6x5 2x3x3x2")
case("max_pool_overlap", pool(F.max_pool2d, 3, 2, 1), "2x3x6x5 2x3x3x3", terms=4)
case("max_pool_ceil", pool(F.max_pool2d, 3, 2, 1, ceil_mode=True), "1x2x6x6 1x2x4x4", terms=4)
case("max_pool_dilated", pool(F.max_pool2d, 2, 1, 0, 2), "1x2x5x5 1x2x3x3", terms=4)
case("max_pool_indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), "2x2x5x5")
case("avg_pool", pool(F.avg_pool2d, 2), "2x3x6x5 2x3x3x2", terms=4)
case("avg_pool_pad", pool(F.avg_pool2d, 3, 2, 1), "2x3x6x5 2x3x3x3", terms=9)
case("avg_pool_ceil", pool(F.avg_pool2d, 3, 2, 1, True, False), "1x2x6x6 1x2x4x4", terms=9)
case("avg_pool_ceil_pad", pool(F.avg_pool2d, 3, 2, 1, True, True), "1x2x6x6 1x2x4x4", terms=9)
case("avg_pool_divisor", pool(F.avg_pool2d, 2, 2, 0, False, True, 3), "1x2x4x4 1x2x2x2", terms=4)
case("adaptive_pool", pool(F.adaptive_avg_pool2d, (2, 3)), "2x3x5x7 2x3x2x3", terms=12)
case("adaptive_pool_1", pool(F.adaptive_avg_pool2d, (1, 1)), "2x3x4x4 2x3x1x1", terms=16)
case("max_pool_large", pool(F.max_pool2d, 3, 2, 1), "8x16x16x16 8x16x8x8", terms=4, large=True)
