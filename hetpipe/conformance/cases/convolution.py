"""Cases of convolutions and pooling, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from hetpipe.conformance.cases.case import aten, grads, r, table

case = table("convolution")


def conv(**how: Any) -> Callable[..., Any]:
    return grads(lambda x, w, b: F.conv2d(x, w, b, **how), 3)


case("conv", conv(), r(2, 3, 6, 5), r(4, 3, 3, 3), r(4), r(2, 4, 4, 3), terms=27)
case(
    "conv_pad_stride",
    conv(padding=1, stride=2),
    r(2, 3, 7, 6),
    r(4, 3, 3, 3),
    r(4),
    r(2, 4, 4, 3),
    terms=36,
)
case("conv_1x1", conv(), r(2, 3, 4, 4), r(5, 3, 1, 1), r(5), r(2, 5, 4, 4), terms=32)
case(
    "conv_one_pixel",
    conv(padding=1),
    r(1, 1, 1, 1),
    r(1, 1, 3, 3),
    r(1),
    r(1, 1, 1, 1),
    terms=9,
)
case(
    "conv_groups",
    conv(groups=2, padding=1),
    r(2, 4, 5, 5),
    r(6, 2, 3, 3),
    r(6),
    r(2, 6, 5, 5),
    terms=50,
)
case(
    "conv_depthwise",
    conv(groups=3, padding=1, stride=2),
    r(2, 3, 5, 5),
    r(3, 1, 3, 3),
    r(3),
    r(2, 3, 3, 3),
    terms=18,
)
case(
    "conv_dilated",
    conv(dilation=2, padding=2),
    r(1, 2, 6, 6),
    r(3, 2, 3, 3),
    r(3),
    r(1, 3, 6, 6),
    terms=36,
)
case(
    "conv_rectangle",
    conv(stride=(1, 2), padding=(0, 2)),
    r(1, 2, 5, 6),
    r(2, 2, 1, 4),
    r(2),
    r(1, 2, 5, 4),
    terms=20,
)
case(
    "conv_no_bias",
    grads(lambda x, w: F.conv2d(x, w), 2),
    r(1, 2, 4, 4),
    r(2, 2, 2, 2),
    r(1, 2, 3, 3),
    terms=9,
)
case(
    "conv_weight_only",
    lambda dy, x, w: aten.convolution_backward(
        dy, x, w, [3], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [False, True, True]
    )[1:],
    r(2, 3, 4, 4),
    r(2, 2, 4, 4),
    r(3, 2, 3, 3),
    terms=32,
)
case(
    "conv1d",
    grads(lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), 3),
    r(2, 3, 8),
    r(4, 3, 3),
    r(4),
    r(2, 4, 4),
    terms=9,
)
case(
    "conv3d",
    grads(lambda x, w: F.conv3d(x, w), 2),
    r(1, 2, 3, 3, 3),
    r(2, 2, 2, 2, 2),
    r(1, 2, 2, 2, 2),
    terms=16,
)
case(
    "conv_transposed",
    grads(lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1), 3),
    r(2, 4, 3, 4),
    r(4, 3, 3, 3),
    r(3),
    r(2, 3, 6, 8),
    terms=96,
)
case(
    "conv_large",
    conv(padding=1),
    r(4, 16, 8, 8),
    r(32, 16, 3, 3),
    r(32),
    r(4, 32, 8, 8),
    terms=256,
    large=True,
)


def pool(fn: Callable[..., torch.Tensor], *args: Any, **how: Any) -> Callable[..., Any]:
    return grads(lambda x: fn(x, *args, **how), 1)


case("max_pool", pool(F.max_pool2d, 2), r(2, 3, 6, 5), r(2, 3, 3, 2))
case("max_pool_overlap", pool(F.max_pool2d, 3, 2, 1), r(2, 3, 6, 5), r(2, 3, 3, 3), terms=4)
case(
    "max_pool_ceil",
    pool(F.max_pool2d, 3, 2, 1, ceil_mode=True),
    r(1, 2, 6, 6),
    r(1, 2, 4, 4),
    terms=4,
)
case("max_pool_dilated", pool(F.max_pool2d, 2, 1, 0, 2), r(1, 2, 5, 5), r(1, 2, 3, 3), terms=4)
case("max_pool_indices", lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True), r(2, 2, 5, 5))
case("avg_pool", pool(F.avg_pool2d, 2), r(2, 3, 6, 5), r(2, 3, 3, 2), terms=4)
case("avg_pool_pad", pool(F.avg_pool2d, 3, 2, 1), r(2, 3, 6, 5), r(2, 3, 3, 3), terms=9)
case(
    "avg_pool_ceil",
    pool(F.avg_pool2d, 3, 2, 1, True, False),
    r(1, 2, 6, 6),
    r(1, 2, 4, 4),
    terms=9,
)
case(
    "avg_pool_ceil_pad",
    pool(F.avg_pool2d, 3, 2, 1, True, True),
    r(1, 2, 6, 6),
    r(1, 2, 4, 4),
    terms=9,
)
case(
    "avg_pool_divisor",
    pool(F.avg_pool2d, 2, 2, 0, False, True, 3),
    r(1, 2, 4, 4),
    r(1, 2, 2, 2),
    terms=4,
)
case("adaptive_pool", pool(F.adaptive_avg_pool2d, (2, 3)), r(2, 3, 5, 7), r(2, 3, 2, 3), terms=12)
case(
    "adaptive_pool_1",
    pool(F.adaptive_avg_pool2d, (1, 1)),
    r(2, 3, 4, 4),
    r(2, 3, 1, 1),
    terms=16,
)
case(
    "max_pool_large",
    pool(F.max_pool2d, 3, 2, 1),
    r(8, 16, 16, 16),
    r(8, 16, 8, 8),
    terms=4,
    large=True,
)
