"""Arithmetic of convolutions: the taps of each pixel, and the shape of register tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from ..lower.builder import node_shape
from ..lower.product import Geometry
from ._common import arguments, why_not_all_float32

MOST_PIXELS = 14
"""Most pixels of a register tile: the sums of a pixel take 2 of 32 registers."""


@dataclass(frozen=True)
class Axis:
    """One dimension of a sum over taps.

    out[u] = sum over t of in[start + u * x_step + t * tap_step] * kernel[first + t * step],
    for u < outputs and t < taps. out[u] is stored at y_start + u * y_step.
    """

    outputs: int
    taps: int
    first: int
    step: int
    start: int
    x_step: int
    tap_step: int
    y_start: int = 0
    y_step: int = 1

    @property
    def end(self) -> int:
        """One past the last input position that the sum reads."""
        if self.taps == 0:
            return 0
        return self.start + (self.outputs - 1) * self.x_step + (self.taps - 1) * self.tap_step + 1


def forward_axis(g: Geometry, dim: int) -> Axis:
    """Return the forward's sum along one dimension."""
    return Axis(g.out_size[dim], g.kernel[dim], 0, 1, -g.padding[dim], g.stride[dim],
                g.dilation[dim])  # fmt: skip


def gradient_axes(g: Geometry, dim: int) -> list[Axis]:
    """Return the input gradient along one dimension: a convolution of stride 1 for each residue.

    Residue r has the inputs i = stride * u + r. Input i receives dy[o] * kernel[k] where
    o * stride + k * dilation - padding = i. So k runs through one residue class modulo
    stride / gcd(stride, dilation), and o decreases as k grows. If no k fits, there are no taps.
    """
    size, stride, padding, dilation = g.size[dim], g.stride[dim], g.padding[dim], g.dilation[dim]
    common = math.gcd(stride, dilation)
    axes = []
    for r in range(min(stride, size)):
        taps = [k for k in range(g.kernel[dim]) if (r + padding - k * dilation) % stride == 0]
        last = taps[-1] if taps else 0
        start = (r + padding - last * dilation) // stride if taps else 0
        axes.append(
            Axis(math.ceil((size - r) / stride), len(taps), last, -(stride // common), start, 1,
                 dilation // common, r, stride)
        )  # fmt: skip
    return axes


@cache
def choose_tile(images: int, rows: int, cols: int) -> tuple[int, int, int]:
    """Return (images, rows, cols) of the register tile with the least waste.

    Waste is the work that the last tiles repeat, the loads of weights per pixel, stores that are
    not neighbours in memory, and border rows that a tile of several rows cannot skip.
    """
    best, best_score = (1, 1, 1), 0.0
    for tc in range(1, min(cols, MOST_PIXELS) + 1):
        for tr in range(1, min(rows, MOST_PIXELS // tc) + 1):
            for ti in range(1, min(images, MOST_PIXELS // (tc * tr)) + 1):
                pixels = ti * tr * tc
                useful = filled(images, ti) * filled(rows, tr) * filled(cols, tc)
                score = (
                    useful * pixels / (pixels + 1) * (1 - 0.01 * (ti * tr - 1) - 0.04 * (tr - 1))
                )
                score *= 1.0 if tc % 4 == 0 else 0.97
                if score > best_score:
                    best, best_score = (ti, tr, tc), score
    return best


def filled(size: int, tile: int) -> float:
    """Return the share of whole tiles, of `tile` elements each, that `size` elements fill."""
    return size / (math.ceil(size / tile) * tile)


def geometry_of(node: fx.Node) -> tuple[Geometry, bool]:
    """Return the geometry of a convolution or its backward, and whether the node is transposed."""
    backward = "backward" in str(node.target)
    x, weight = map(node_shape, arguments(node)[backward : 2 + backward])
    y = node_shape(arguments(node)[0] if backward else node)
    stride, padding, dilation, transposed, _, groups = arguments(node)[3 + backward : 9 + backward]
    wide, narrow = (y, x) if transposed else (x, y)
    dims = len(x) - 2
    geometry = Geometry(
        images=wide[0],
        groups=groups,
        in_channels=wide[1],
        out_channels=narrow[1],
        size=_pair(wide[2:], 1, dims),
        out_size=_pair(narrow[2:], 1, dims),
        kernel=_pair(weight[2:], 1, dims),
        stride=_pair(stride, 1, dims),
        padding=_pair(padding, 0, dims),
        dilation=_pair(dilation, 1, dims),
    )
    return geometry, bool(transposed)


def why_not(node: fx.Node) -> str | None:
    """Return why a convolution cannot be lowered, or None if it can."""
    dims = node.all_input_nodes[0].meta["val"].dim()
    if dims not in (3, 4):
        return f"its kernels convolve 1 or 2 dimensions, not {dims - 2}"
    return why_not_all_float32(node)


def _pair(values: Any, missing: int, dims: int) -> tuple[int, int]:
    """Return (rows, cols) from `dims` numbers, or from one for all; in 1-d, rows are `missing`."""
    pair = tuple(map(int, values)) * (dims if len(values) == 1 else 1)
    return (missing, pair[0]) if len(pair) == 1 else (pair[0], pair[1])
