"""Divides products on GPUs into tiles, and long sums into parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..lower.builder import Builder
from ..lower.epilogue import OwnLaunch, alone
from ..lower.expr import Value
from ..lower.launch import Kernel, Tile
from ..lower.product import Patches, Product
from ..lower.reduce import SUM, reduce
from ..lower.signature import Argument
from ..lower.target import Target

DEPTH = 16
"""Steps of k in local memory at the same time."""
GROUPS_PER_UNIT = 4
"""Work-groups for each compute unit, so that some compute while others wait for memory."""
SHORTEST_PART = 256
"""Least steps of k in a part of a sum: storing and adding a shorter part would cost too much."""


@dataclass(frozen=True)
class Tiles:
    """The square tiles of `batches` matrices C of rows x cols; a work-group computes one tile."""

    rows: int
    cols: int
    batches: int
    depth: int
    group: int
    """Work-items of a work-group in each direction."""
    item: int
    """Elements of a work-item in each direction."""
    parts: int = 1
    """Parts of each sum over k; they are computed separately, then added in order."""

    @property
    def each(self) -> int:
        """Steps of k in each part."""
        return -(-self.depth // self.parts)

    @property
    def macros(self) -> tuple[str, ...]:
        return (f"GROUP={self.group}", f"ITEM={self.item}", f"DEPTH={DEPTH}")

    @property
    def global_size(self) -> tuple[int, int, int]:
        """Work-items across the columns, across the rows, and over parts and batches."""
        side = self.group * self.item
        across, down = math.ceil(self.cols / side), math.ceil(self.rows / side)
        return (across * self.group, down * self.group, self.parts * self.batches)


def tiles_of(
    target: Target, size: tuple[int, int, int], batches: int, divides: bool = True
) -> Tiles:
    """Choose a tile size: large tiles read less memory; small tiles waste less at the edges.

    `size` is (rows, columns, depth). With `divides`, long sums are divided into parts if there are
    too few tiles to fill the device.
    """
    rows, cols, depth = size
    group = 16 if target.max_work_group_size >= 256 else 8
    item = 4 if min(rows, cols) > 2 * group else 2
    tiles = Tiles(rows, cols, batches, depth, group, item)
    across, down, _ = tiles.global_size
    groups = across * down * batches // group**2
    parts = min(GROUPS_PER_UNIT * target.compute_units // groups, depth // SHORTEST_PART)
    return replace(tiles, parts=max(1, parts)) if divides else tiles


def tiled_product(builder: Builder, p: Product) -> Value:
    """Compute C of a product, row-major, of shape (batch, rows, cols)."""
    tiles = tiles_of(builder.device, (p.rows, p.cols, p.depth), p.batch)
    return launch(
        builder, ["gpu/matmul.cl"], "matmul", tiles, (p.batch, p.rows, p.cols),
        {
            **p.operands, "batches": p.batch, "rows": p.rows, "cols": p.cols, "depth": p.depth,
            "each": tiles.each, **p.scaling,
        },
    )  # fmt: skip


def tiled_patches(builder: Builder, p: Patches) -> Value:
    """Compute a convolution or one of its gradients."""
    divides = p.kind == "weight_gradient"
    tiles = tiles_of(builder.device, p.size, p.geometry.groups, divides)
    args = {**p.operands, **p.shift, **p.geometry.arguments}
    if divides:
        args["each"] = tiles.each
    return launch(builder, ("patches.cl", "gpu/convolution.cl"), p.kind, tiles, p.shape, args)


def launch(
    builder: Builder, files: Sequence[str], function: str, tiles: Tiles, shape: tuple[int, ...],
    args: Mapping[str, Argument],
) -> Value:  # fmt: skip
    """Launch a kernel of `kernels/gpu/`; an epilogue can be added if the sums are in one part."""
    kernel = Kernel.of_files(function, ("gpu/tile.cl", *files), *tiles.macros)
    own = OwnLaunch(kernel, args, tiles.global_size, (tiles.group, tiles.group, 1))
    if tiles.parts == 1:
        out = builder.new(shape, "float32")
        launches = alone(own.with_stores, out)
        builder.product(out, Tile(out.shape, out.dtype, launches, own.with_stores))
        return out
    parts = builder.new((tiles.parts, *shape), "float32")
    for each in alone(own.with_stores, parts):
        builder.add(each)
    return reduce(builder, builder.pool.load(parts), [0], SUM)
