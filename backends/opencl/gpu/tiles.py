"""Divides products on GPUs into tiles, and long sums into parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lower.builder import Builder
from ..lower.expr import Value
from ..lower.launch import Kernel, Tile
from ..lower.reduce import SUM, reduce
from ..lower.signature import Argument
from ..lower.store_macros import OwnLaunch
from ..lower.target import Target

DEPTH = 16
"""Steps of k in local memory at once."""
GROUPS_PER_UNIT = 4
"""Work-groups that keep a compute unit busy while others wait for memory."""
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
    def options(self) -> tuple[str, ...]:
        """Compiler options of the kernels' source."""
        return (f"-DGROUP={self.group}", f"-DITEM={self.item}", f"-DDEPTH={DEPTH}")

    @property
    def global_size(self) -> tuple[int, int, int]:
        """Work-items across the columns, across the rows, and over parts and batches."""
        side = self.group * self.item
        across, down = math.ceil(self.cols / side), math.ceil(self.rows / side)
        return (across * self.group, down * self.group, self.parts * self.batches)

    @property
    def local_size(self) -> tuple[int, int, int]:
        """Work-items of a work-group."""
        return (self.group, self.group, 1)


def tiles_of(target: Target, rows: int, cols: int, depth: int, batches: int = 1) -> Tiles:
    """Choose a tile size: large tiles read less; small ones are more numerous and waste less."""
    group = 16 if target.max_work_group_size >= 256 else 8
    item = 4 if min(rows, cols) > 2 * group else 2
    return Tiles(rows, cols, batches, depth, group, item)


def in_parts(tiles: Tiles, target: Target) -> Tiles:
    """Divide long sums into parts if there are too few tiles to fill the device."""
    across, down, _ = tiles.global_size
    groups = across * down * tiles.batches // tiles.group**2
    parts = min(GROUPS_PER_UNIT * target.compute_units // groups, tiles.depth // SHORTEST_PART)
    return Tiles(
        tiles.rows, tiles.cols, tiles.batches, tiles.depth, tiles.group, tiles.item, max(1, parts)
    )


def launch(
    builder: Builder, files: Sequence[str], function: str, tiles: Tiles, shape: tuple[int, ...],
    args: Mapping[str, Argument],
) -> Value:  # fmt: skip
    """Launch a kernel of `kernels/gpu/`, and return its result, of `shape`.

    The result can take an epilogue if its sums are in one part.
    """
    text = "".join(map(builder.source, ("gpu/tile.cl", *files)))
    kernel = Kernel(text, function, tiles.options)
    own = OwnLaunch(kernel, args, tiles.global_size, tiles.local_size)
    if tiles.parts == 1:
        out = builder.new(shape, "float32")
        builder.product(out, Tile(out.shape, out.dtype, tuple(own.plain(out)), own.with_stores))
        return out
    parts = builder.new((tiles.parts, *shape), "float32")
    for each in own.plain(parts):
        builder.add(each)
    return reduce(builder, builder.pool.load(parts), [0], SUM)
