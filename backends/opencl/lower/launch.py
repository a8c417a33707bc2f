"""The records of lowering: kernels, their launches, and the stores that become kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from itertools import pairwise
from typing import NamedTuple

from hetpipe.entries import key_of
from hetpipe.errors import BackendError

from .expr import Expr, Layout, Value, loads

Panels = tuple[str, str]
"""How a product finds its left and its right operand; see `kernels/cpu/matmul.cl`."""
MOST_TENSORS = 24
"""Most tensors of a generated kernel."""
BLOCKS = 16
"""Blocks per launch; a launch with fewer steps stays whole."""

Block = tuple[tuple[int, ...] | None, tuple[int, ...]]
"""Offset and size of a part of a launch's range; the offset None means 0."""
HELPERS = {
    "exact_erf(": "erf.cl", "exp_minus_square(": "erf.cl", "erf_plus_one(": "erf.cl",
    "exact_sin(": "exact.cl", "exact_cos(": "exact.cl", "exact_tan(": "exact.cl",
    "exact_pow(": "exact.cl", "exact_fmod(": "exact.cl", "exact_exp(": "exp.cl", "gelu(": "gelu.cl",
    "vstore16_at_once(": "store.cl",
}  # fmt: skip
"""The file of each function that generated code may call; callers come before their callees."""


@dataclass(frozen=True)
class Kernel:
    """A kernel function of an OpenCL source, specialised by `-D` options."""

    source: str
    name: str
    options: tuple[str, ...] = ()
    generated: bool = False
    """Whether the name is unique to this text, so that many kernels can share a program."""

    @classmethod
    def of_files(cls, name: str, files: Iterable[str], *macros: str) -> Kernel:
        """Return a kernel of files of `hetpipe.kernels`; each macro becomes a `-D` option."""
        source = "".join(map(kernel_source, files))
        return cls(source, name, tuple(f"-D{macro}" for macro in macros))


@cache
def kernel_source(path: str) -> str:
    """Return the text of a file of `hetpipe.kernels`. Raises `BackendError` if it is missing."""
    try:
        return files("hetpipe.kernels").joinpath(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BackendError(f"there is no kernel source {path!r} in hetpipe.kernels") from error


def with_helpers(text: str) -> str:
    """Return generated code, preceded by the functions of HELPERS that it calls and lacks."""
    for call, file in HELPERS.items():
        if call in text and kernel_source(file) not in text:
            text = f"{kernel_source(file)}\n{text}"
    return text


@cache
def helpers_identity() -> str:
    """Return a hash of all functions that generated code may call."""
    return key_of({call: kernel_source(file) for call, file in HELPERS.items()})


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
    """Ids of tensors, such as scratch memory, that the kernel uses while it still reads `inplace`
    tensors. These tensors never take the memory of an `inplace` tensor."""
    steady: bool = False
    """Whether the launch reads only weights, so that it runs again only when they change."""
    beside: int = 0
    """The additional queue in which this launch of a dataflow runs, or 0 for the queue of its pass.
    A dataflow ends with the next launch whose `beside` is 0. Its launches run together and send
    data through channels; the last launch receives all data."""
    step: int = 0
    """Elements of the results that a step of the first global id completes, in row-major order; 0
    if steps do not complete them in this order."""

    @property
    def touches(self) -> set[int]:
        """Ids of the tensors that the launch reads or writes."""
        return {arg.id for arg in self.args if isinstance(arg, Value)}


@dataclass(frozen=True, eq=False)
class Tile(Expr):
    """An element of a matrix product, in a register of the kernel that computes the product.

    `launches` compute and store the product. `with_stores` returns the launches of the product and
    its epilogue. If it is None, the epilogue becomes part of the last launch.
    """

    launches: tuple[Launch, ...]
    with_stores: WithStores | None = None
    row_cols: int = 0
    """The most columns of a product that `with_stores` can fuse with a kernel over whole rows."""
    by_channel: bool = False
    """Whether rows are channels, as in a convolution: a kernel over channels can be fused."""
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
        """Whether the store fills all of `out` in row-major order."""
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

        The store and the group must have the same shape and share tensors. If the store reads a
        tensor that the group writes, it must read the tensor element by element.
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


class Part(NamedTuple):
    """Elements lo..hi-1 of an output are complete when this block of a launch has ended."""

    output: int
    lo: int
    hi: int
    launch: int
    block: int


def blocks_of(launch: Launch) -> list[Block]:
    """Return the blocks of a launch along its first dimension; none if the launch stays whole.

    With blocks, the first rows of an output can be sent while the launch runs.
    """
    steps, rest = launch.global_size[0], launch.global_size[1:]
    if not launch.step or launch.steady or steps < BLOCKS:
        return []
    bounds = [steps * part // BLOCKS for part in range(BLOCKS + 1)]
    zeros = (0,) * len(rest)
    return [((lo, *zeros), (hi - lo, *rest)) for lo, hi in pairwise(bounds)]


def finished_parts(outputs: Sequence[Value | None], launches: Sequence[Launch]) -> list[Part]:
    """Return the parts of outputs that blocks of launches complete, in order.

    The first launch with a `step` that touches a tensor counts as the tensor's writer. If this
    launch only reads the tensor, an earlier launch has completed it, since the queue is in order.
    """
    makers: dict[int, int] = {}
    for number, launch in enumerate(launches):
        if launch.step:
            makers = dict.fromkeys(launch.touches, number) | makers
    parts = []
    for index, value in enumerate(outputs):
        if value is None or value.id not in makers:
            continue
        number = makers[value.id]
        launch, reached = launches[number], 0
        steps, step = launch.global_size[0], launch.step
        # The launch's steps together must cover exactly the elements of the tensor.
        fits = (steps - 1) * step < value.numel <= steps * step
        for block, (_, size) in enumerate(blocks_of(launch) if fits else ()):
            lo, reached = reached, min(reached + size[0] * step, value.numel)
            parts.append(Part(index, lo, reached, number, block))
    return parts
