"""Divides products on GPUs into tiles, and long sums into parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..lower.builder import Builder
from ..lower.epilogue import OwnLaunch, alone
from ..lower.expr import Value
from ..lower.launch import Kernel, Tile
from ..lower.product import Operand, Patches, Product
from ..lower.reduce import reduce
from ..lower.reductions import SUM
from ..lower.signature import Argument
from ..lower.target import Target

DEPTHS = {8: 8, 4: 16, 2: 16}
"""Steps of k in local memory at the same time, by the elements of a work-item in each direction.

With more steps, the largest tiles would not leave room for a second work-group.
"""
GROUPS_PER_UNIT = 4
"""Work-groups for each compute unit, so that some compute while others wait for memory."""
SHORTEST_PART = 256
"""Least steps of k in a part of a sum: storing and adding a shorter part would cost too much."""
LOADS = 4
"""Cost of loading an element from local memory, in multiply-adds."""
VECTOR = 4
"""Neighbours in memory that a work-item loads at once."""


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
        """Steps of k in each part: whole steps of a tile, unless there is only one part."""
        if self.parts == 1:
            return self.depth
        return math.ceil(self.depth / self.parts / self.step) * self.step

    @property
    def step(self) -> int:
        """Steps of k in local memory at the same time."""
        return DEPTHS[self.item]

    @property
    def side(self) -> int:
        """Rows and columns of a tile."""
        return self.group * self.item

    @property
    def local_nbytes(self) -> int:
        """Bytes of local memory for one step of both operands, see `kernels/gpu/tile.cl`."""
        return 2 * self.step * (self.side + 4) * 4

    @property
    def count(self) -> int:
        """Number of work-groups."""
        sides = math.ceil(self.rows / self.side), math.ceil(self.cols / self.side)
        return math.prod(sides) * self.batches * self.parts

    @property
    def global_size(self) -> tuple[int, int, int]:
        """Work-items across the columns, across the rows, and over parts and batches."""
        across, down = math.ceil(self.cols / self.side), math.ceil(self.rows / self.side)
        return (across * self.group, down * self.group, self.parts * self.batches)

    def macros(self, target: Target) -> tuple[str, ...]:
        """Return the options of `kernels/gpu/tile.cl`.

        Two steps are in local memory at the same time if two work-groups with two steps fit.
        """
        double = ("DOUBLE",) if 4 * self.local_nbytes <= target.local_memory_nbytes else ()
        return (f"GROUP={self.group}", f"ITEM={self.item}", f"DEPTH={self.step}", *double)

    def divided(self, units: int) -> Tiles:
        """Divide long sums into parts if there are too few tiles for `units` compute units."""
        most = min(GROUPS_PER_UNIT * units // self.count, self.depth // SHORTEST_PART)
        parts = replace(self, parts=max(1, most))
        return replace(parts, parts=math.ceil(self.depth / parts.each))

    def time(self, units: int) -> float:
        """Return the time of the compute unit with most tiles, in multiply-adds of one row of k.

        A work-item loads 2 * `item` elements from local memory for `item` ** 2 multiply-adds. So
        large tiles are faster for each element, but waste more at the edges and fill fewer units.
        """
        of_tile = self.side**2 * (1 + LOADS / self.item)
        return math.ceil(self.count / units) * of_tile / self.parts


def group_of(target: Target) -> int:
    """Return the work-items of a work-group in each direction."""
    return 16 if target.max_work_group_size >= 256 else 8


def tiles_of(
    target: Target, size: tuple[int, int, int], batches: int, divides: bool = True
) -> Tiles:
    """Choose the tile size with the least modelled time that fits the device's local memory.

    `size` is (rows, columns, depth). With `divides`, long sums are divided into parts if there are
    too few tiles to fill the device.
    """
    group = group_of(target)
    units = target.compute_units
    tiles = [Tiles(size[0], size[1], batches, size[2], group, item) for item in DEPTHS]
    fitting = [each for each in tiles if each.local_nbytes <= target.local_memory_nbytes]
    ready = [each.divided(units) if divides else each for each in fitting or tiles[-1:]]
    return min(ready, key=lambda each: each.time(units))


def loads_of(name: str, operand: Operand, lines: int, depth: int) -> tuple[str, str]:
    """Return the options that say how work-items load an operand: see `kernels/gpu/tile.cl`.

    `operand` has a row for each line of the tile. Vectors need aligned addresses, and whole vectors
    in each line or in each k.
    """
    along_k = operand.col == 1 or operand.row != 1
    near, far, length = (
        (operand.col, operand.row, depth) if along_k else (operand.row, operand.col, lines)
    )
    steps = (far, operand.offset, operand.batch, length)
    aligned = near == 1 and not any(step % VECTOR for step in steps)
    return _loads(name, "K" if along_k else "LINES", VECTOR if aligned else 1)


def _product_launch(builder: Builder, p: Product, tiles: Tiles) -> OwnLaunch:
    """Return the launch that computes the parts of C: (parts, batch, rows, cols)."""
    macros = (
        *loads_of("A", p.left, p.rows, p.depth),
        *loads_of("B", p.right.transposed, p.cols, p.depth),
    )
    return _launch(
        builder, ["gpu/matmul.cl"], "matmul", tiles, macros,
        {
            **p.operands, "batches": p.batch, "rows": p.rows, "cols": p.cols, "depth": p.depth,
            "each": tiles.each, **p.scaling,
        },
    )  # fmt: skip


def tiled_product(builder: Builder, p: Product) -> Value:
    """Compute C of a product, row-major, of shape (batch, rows, cols)."""
    tiles = tiles_of(builder.device, (p.rows, p.cols, p.depth), p.batch)
    launch = _product_launch(builder, p, tiles)
    return _computed(builder, launch, tiles, (p.batch, p.rows, p.cols))


def product_parts(builder: Builder, p: Product) -> Value:
    """Compute the parts of C, (parts, batch, rows, cols); their sum is the product."""
    tiles = tiles_of(builder.device, (p.rows, p.cols, p.depth), p.batch)
    return _parts(builder, _product_launch(builder, p, tiles), tiles, (p.batch, p.rows, p.cols))


def tiled_patches(builder: Builder, p: Patches) -> Value:
    """Compute a convolution or one of its gradients."""
    divides = p.kind == "weight_gradient"
    tiles = tiles_of(builder.device, p.size, p.geometry.groups, divides)
    args = {**p.operands, **p.shift, **p.geometry.arguments}
    if divides:
        args["each"] = tiles.each
    files = ("patches.cl", "gpu/convolution.cl")
    launch = _launch(builder, files, p.kind, tiles, patch_macros(p), args)
    return _computed(builder, launch, tiles, p.shape)


def patch_macros(p: Patches) -> tuple[str, ...]:
    """Return the options of `kernels/gpu/convolution.cl`: the filter, and how operands are loaded.

    Filters and gradients load vectors of weights or pixels if these are neighbours in memory.
    Images load vectors only for filters that read exactly one pixel for each pixel of the result.
    """
    g, channels = p.geometry, p.geometry.channels()[1]
    taps, pixels = math.prod(g.kernel), math.prod(g.out_size)
    is_plain = taps == 1 and g.stride == (1, 1) and g.padding == (0, 0)
    right = "LINES", pixels if is_plain else 1
    if p.kind == "forward":
        left = "K", channels * taps
    elif p.kind == "weight_gradient":
        left, right = ("K", pixels), ("K", 1)
    else:
        left = ("LINES", channels) if taps == 1 else ("K", 1)
    sizes = g.pairs("kernel", "stride")
    return (
        *(f"{name.upper()}={size}" for name, size in sizes.items()),
        *_loads("A", *left),
        *_loads("B", *right),
    )


def _loads(name: str, along: str, length: int) -> tuple[str, str]:
    """Return how to load an operand whose elements are neighbours in memory for `length`."""
    return f"{name}_ALONG={along}", f"{name}_WIDTH={1 if length % VECTOR else VECTOR}"


def _launch(
    builder: Builder, files: Sequence[str], function: str, tiles: Tiles, macros: Sequence[str],
    args: Mapping[str, Argument],
) -> OwnLaunch:  # fmt: skip
    """Return the launch of a kernel of `kernels/gpu/` that lacks only its stores."""
    options = (*tiles.macros(builder.device), *macros)
    kernel = Kernel.of_files(function, ("gpu/tile.cl", *files), *options)
    return OwnLaunch(kernel, args, tiles.global_size, (tiles.group, tiles.group, 1))


def _computed(builder: Builder, own: OwnLaunch, tiles: Tiles, shape: tuple[int, ...]) -> Value:
    """Add a launch and return its result; sums in one part can have an epilogue."""
    if tiles.parts == 1:
        out = builder.new(shape, "float32")
        launches = alone(own.with_stores, out)
        builder.product(out, Tile(out.shape, out.dtype, launches, own.with_stores))
        return out
    return reduce(builder, builder.pool.load(_parts(builder, own, tiles, shape)), [0], SUM)


def _parts(builder: Builder, own: OwnLaunch, tiles: Tiles, shape: tuple[int, ...]) -> Value:
    parts = builder.new((tiles.parts, *shape), "float32")
    for each in alone(own.with_stores, parts):
        builder.add(each)
    return parts
