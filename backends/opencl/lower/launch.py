"""The records of lowering: kernels, their launches, and the stores that become kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .expr import Expr, Layout, Value, loads

Panels = tuple[str, str]
"""How a product finds its left and its right operand; see `kernels/cpu/matmul.cl`."""
MOST_TENSORS = 24
"""Most tensors of a generated kernel."""


@dataclass(frozen=True)
class Kernel:
    """A kernel function of an OpenCL source, specialised by `-D` options."""

    source: str
    name: str
    options: tuple[str, ...] = ()
    generated: bool = False
    """Whether the name is unique to this text, so that many kernels can share a program."""


@dataclass(frozen=True)
class Launch:
    """One run of a kernel over one range of work-items."""

    kernel: Kernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Value | int | float, ...]
    inplace: frozenset[int] = field(default_factory=frozenset)
    """Ids of tensors whose memory a result of the same size may take: the kernel reads each of
    their elements just before it writes the same element of the result."""
    apart: frozenset[int] = field(default_factory=frozenset)
    """Ids of tensors, such as scratch memory, that the kernel uses while it still reads the
    `inplace` tensors, and that therefore never take their memory."""
    steady: bool = False
    """Whether it reads only weights, so that it runs again only when the weights change."""
    beside: int = 0
    """0: it runs in the queue of its pass. Otherwise it belongs to a dataflow, together with all
    launches up to and including the next launch with 0. The launches of a dataflow run at once and
    send data to each other through channels; this number names the additional queue in which this
    launch runs. The last launch receives all data."""
    step: int = 0
    """Elements of its results that each step of the first global id completes; 0 if it does not
    complete them in row-major order."""

    @property
    def touches(self) -> set[int]:
        """Ids of the tensors that the launch reads or writes."""
        return {arg.id for arg in self.args if isinstance(arg, Value)}


@dataclass(frozen=True, eq=False)
class Tile(Expr):
    """An element of a matrix product, in a register of the kernel that computes the product.

    `launches` compute and store the product; an epilogue can be added to the last launch. If that
    kernel is not generated, `with_stores` makes the launches of the product and its epilogue.
    """

    launches: tuple[Launch, ...]
    with_stores: WithStores | None = None
    row_cols: int = 0
    """The most columns of a product that `with_stores` can fuse with a kernel over whole rows."""
    by_channel: bool = False
    """Whether it is a convolution, whose rows are channels: it can be fused with a kernel over all
    pixels of each channel."""
    panels: Panels | None = None
    """How a kernel of the family `cpu` finds the panels of its operands; None in other families."""


@dataclass(frozen=True)
class Store:
    """Writes `expr` to the elements of `out` that `layout` names."""

    expr: Expr
    out: Value
    layout: Layout

    @property
    def plain(self) -> bool:
        """Whether it fills all of `out` in row-major order."""
        whole = self.expr.numel == math.prod(self.out.shape)
        return whole and self.layout == Layout.row_major(self.expr.shape)

    @cached_property
    def reads(self) -> frozenset[int]:
        """Ids of the tensors that the expression reads."""
        ids = {load.value.id for load in loads(self.expr)}
        if isinstance(self.expr, Tile):
            ids.update(*(launch.touches for launch in self.expr.launches))
        return frozenset(ids)

    def joins(self, group: Sequence[Store]) -> bool:
        """Return whether this store can be in one kernel with `group`, and is faster there.

        Both must have the same shape and share tensors. If this store reads a tensor that the group
        writes, it must read it element by element.
        """
        if self.expr.shape != group[0].expr.shape or not all(s.plain for s in (self, *group)):
            return False
        mine = loads(self.expr)
        theirs = {key for store in group for key in store.reads}
        written = {store.out.id for store in group}
        read = self.reads
        if len(read | theirs | written) >= MOST_TENSORS:
            return False
        shares = bool(read & (theirs | written)) or not (read or theirs)
        return shares and all(load.plain for load in mine if load.value.id in written)

    def follows(self, group: Sequence[Store]) -> bool:
        """Return whether this store reads or overwrites a tensor that `group` writes."""
        touched = self.reads | {self.out.id}
        return any(store.out.id in touched for store in group)


WithStores = Callable[[Sequence[Store], Sequence[Store]], Sequence[Launch]]
"""Makes the launches of a product from its group of stores and the stores to keep."""
