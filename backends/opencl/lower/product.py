"""Products and convolutions that lowerings request, whichever kernels compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from .expr import Value
from .signature import Argument


@dataclass(frozen=True)
class Geometry:
    """A convolution, not transposed: x [N][in_channels][size] -> y [N][out_channels][out_size]."""

    images: int
    groups: int
    in_channels: int
    out_channels: int
    size: tuple[int, int]
    out_size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def arguments(self) -> dict[str, int]:
        """Arguments for the parameters `SHAPE` of `kernels/patches.cl`."""
        return {
            "images": self.images, "groups": self.groups, "in_channels": self.in_channels,
            "out_channels": self.out_channels, **self.sizes,
            **self.pairs("kernel", "stride", "dilation"),
            "pad_h": self.padding[0], "pad_w": self.padding[1],
        }  # fmt: skip

    @property
    def sizes(self) -> dict[str, int]:
        """Arguments height, width, out_height and out_width."""
        names = ("height", "width", "out_height", "out_width")
        return dict(zip(names, self.size + self.out_size, strict=True))

    @property
    def window(self) -> dict[str, int]:
        """Arguments of kernels for CPUs: kernel, stride, padding and dilation, each in h and w."""
        return self.pairs("kernel", "stride", "padding", "dilation")

    def pairs(self, *names: str) -> dict[str, int]:
        """Return the arguments NAME_h and NAME_w for each of the attributes `names`."""
        return {
            f"{name}_{letter}": getattr(self, name)[dim]
            for name in names
            for dim, letter in enumerate("hw")
        }

    def extent(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the rows and columns of x, with padding, that `rows` x `cols` outputs read."""
        steps = zip((rows, cols), self.stride, self.kernel, self.dilation, strict=True)
        height, width = ((n - 1) * s + (k - 1) * d + 1 for n, s, k, d in steps)
        return height, width

    def channels(self, flipped: bool = False) -> tuple[int, int]:
        """Return (lanes, depth): output and input channels of a group, exchanged if `flipped`."""
        lanes, depth = self.out_channels // self.groups, self.in_channels // self.groups
        return (depth, lanes) if flipped else (lanes, depth)


@dataclass(frozen=True)
class Operand:
    """A batch of matrices in memory; `batch`, `row`, `col` and `outer` are strides in elements.

    `outer` is the stride from one group of matrices to the next, see `Product.inner`.
    """

    value: Value
    offset: int
    batch: int
    row: int
    col: int
    outer: int = 0

    @property
    def transposed(self) -> Operand:
        """The same memory with rows and columns exchanged."""
        return replace(self, row=self.col, col=self.row)


@dataclass(frozen=True)
class Product:
    """The product C = alpha * left @ right + beta * bias; left: rows x depth, right: depth x cols.

    An operand has `batch` matrices in groups of `inner`; with `inner` 0 they form one group.
    """

    batch: int
    rows: int
    cols: int
    depth: int
    left: Operand
    right: Operand
    bias: Operand | None = None
    alpha: float = 1.0
    beta: float = 0.0
    inner: int = 0

    @property
    def operands(self) -> dict[str, Argument]:
        """Kernel arguments a and b, with their offsets and strides."""
        a, b = self.left, self.right
        return {
            "a": a.value, "a_offset": a.offset, "a_batch": a.batch, "a_row": a.row, "a_k": a.col,
            "b": b.value, "b_offset": b.offset, "b_batch": b.batch, "b_k": b.row, "b_col": b.col,
        }  # fmt: skip

    @property
    def scaling(self) -> dict[str, Argument]:
        """Kernel arguments alpha, beta, and the bias with its offset and strides.

        Without a bias, beta is 0 and `left` takes the place of the bias.
        """
        bias = self.bias or replace(self.left, offset=0, batch=0, row=0, col=0)
        beta = float(self.beta) if self.bias else 0.0
        return {
            "alpha": float(self.alpha), "beta": beta, "bias": bias.value,
            "bias_offset": bias.offset, "bias_batch": bias.batch, "bias_row": bias.row,
            "bias_col": bias.col,
        }  # fmt: skip


@dataclass(frozen=True)
class Patches:
    """A convolution or one of its gradients, as a product that reads patches from the images.

    `kind` is "forward", "input_gradient" or "weight_gradient". `operands` maps the kernels'
    parameters to the two tensors. Each group of channels is one matrix of the batch.
    """

    kind: str
    geometry: Geometry
    operands: Mapping[str, Value]
    bias: Value | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        g = self.geometry
        if self.kind == "weight_gradient":
            return (g.out_channels, g.in_channels // g.groups, *g.kernel)
        is_forward = self.kind == "forward"
        return (g.images, g.out_channels, *g.out_size) if is_forward else (
            g.images, g.in_channels, *g.size)  # fmt: skip

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, columns and depth of the product."""
        g = self.geometry
        (lanes, depth), taps = g.channels(), math.prod(g.kernel)
        pixels = g.images * math.prod(g.out_size)
        if self.kind == "weight_gradient":
            return lanes, depth * taps, pixels
        if self.kind == "forward":
            return lanes, pixels, depth * taps
        return depth, g.images * math.prod(g.size), lanes * taps

    @property
    def shift(self) -> dict[str, Argument]:
        """Kernel arguments of the bias, or of a stand-in for it; a weight gradient has none."""
        if self.kind == "weight_gradient":
            return {}
        stand_in = next(iter(self.operands.values()))
        return {"bias": self.bias or stand_in, "has_bias": int(self.bias is not None)}
