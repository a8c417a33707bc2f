"""Generates the text of fused elementwise kernels.

On a CPU, a work-item computes rows of the innermost dimension, 16 elements at a time; on a GPU it
computes one element. Expressions that are constant along a row are computed once per row. The
number of rows is an argument, so micro-batches of all sizes share one text.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files

from hetpipe.entries import key_of
from hetpipe.errors import BackendError

from .body import Body
from .cnames import pointed
from .expr import Coord, Expr, Layout, Load, Value, loads, walk
from .nest import Nest
from .target import Target

BLOCK = 4096
"""Elements per work-item on a CPU: enough to hide the cost of a work-group."""
TILE = 256
"""Columns per work-item if the kernel reads across rows."""
LANES = 16
Panels = tuple[str, str]
"""How a product finds its left and its right operand; see `kernels/cpu/matmul.cl`."""
MOST_TENSORS = 24
HELPERS = {
    "exact_erf(": "erf.cl", "exp_minus_square(": "erf.cl", "erf_plus_one(": "erf.cl",
    "exact_sin(": "exact.cl", "exact_cos(": "exact.cl", "exact_tan(": "exact.cl",
    "exact_pow(": "exact.cl", "exact_fmod(": "exact.cl", "exact_exp(": "exp.cl", "gelu(": "gelu.cl",
    "vstore16_at_once(": "store.cl",
}  # fmt: skip
"""The file that defines each function that generated code may call; callers come before the
functions that they call."""


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


@dataclass(frozen=True)
class Code:
    """A generated kernel and how to launch it."""

    text: str
    name: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Value | int | float, ...]


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


def generate(group: Sequence[Store], target: Target, kept: Sequence[Store]) -> Code:
    """Return one kernel for a group of stores of one shape; only stores in `kept` write memory."""
    exprs = list(walk(*(store.expr for store in group)))
    layouts = [item.layout for item in exprs if isinstance(item, (Load, Coord))]
    layouts += [store.layout for store in group]
    nest = Nest(group[0].expr.shape, layouts)
    body = Body(nest, {store.out.id: store.expr for store in group})
    body.vectorises = nest.inner >= (2 if nest.rows == 1 else LANES) and all(
        map(body.has_lanes, exprs)
    )
    if target.kind == "gpu":
        lines, count = _by_element(body, kept)
        width = min(256, target.max_work_group_size)
        size = (-(-count // width) * width,)
        local = (width,)
    else:
        straight = all(body.in_step(item) for item in exprs if isinstance(item, Load))
        padded = straight and all(store.plain for store in group) and not target.checks_memory
        lines, count = _by_row(body, kept, padded)
        size, local = (count,), (1,)
    args: list[Value | int | float] = list(body.tensors.values())
    parameters = [f"__global {pointed(value.dtype)} *{name}" for name, value in body.named.items()]
    parameters.append(f"const int {'n' if nest.rows == 1 else 'rows'}")
    args.append(nest.inner if nest.rows == 1 else nest.rows)
    return finish(lines, parameters, size, local, tuple(args))


def finish(
    lines: Sequence[str],
    parameters: Sequence[str],
    global_size: tuple[int, ...],
    local_size: tuple[int, ...] | None,
    args: tuple[Value | int | float, ...],
) -> Code:
    """Return a kernel with these statements, named by the hash of its text."""
    inside = "\n".join(f"    {line}" for line in lines)
    signature = ",\n    ".join(parameters)
    digest = hashlib.sha256((signature + inside).encode()).hexdigest()[:16]
    name = f"fused_{digest}"
    text = f"__kernel void {name}(\n    {signature})\n{{\n{inside}\n}}\n"
    return Code(text, name, global_size, local_size, args)


def _by_row(body: Body, group: Sequence[Store], padded: bool) -> tuple[list[str], int]:
    nest = body.nest
    if nest.rows == 1:
        head = [
            f"const int begin = get_global_id(0) * {BLOCK};",
            f"const int end = min(begin + {BLOCK}, n);",
        ]
        loops = _loops(body, group, ("begin", "end"), not padded)
        return head + body.row_lines([]) + loops, -(-nest.inner // BLOCK)
    # Neighbouring rows share the cache lines that a step other than 1 touches: walk in tiles.
    crooked = any(nest.step(layout) not in (0, 1) for layout in nest.layouts)
    span = min(nest.inner, TILE if crooked else BLOCK)
    each = max(1, BLOCK // span)
    blocks = -(-nest.inner // span)
    loops = _loops(body, group, ("begin", "end"), nest.inner % LANES != 0)
    lines = [
        f"const int first = get_global_id(0) / {blocks} * {each};",
        f"const int begin = get_global_id(0) % {blocks} * {span};",
        f"const int end = min(begin + {span}, {nest.inner});",
        *indent(
            body.row_lines(body.coordinates("row")) + loops,
            f"for (int row = first; row < min(first + {each}, rows); ++row) {{",
            "}",
        ),
    ]
    return lines, -(-nest.rows // each) * blocks


def _loops(body: Body, group: Sequence[Store], span: tuple[str, str], tail: bool) -> list[str]:
    """Return loops over `i` from `span[0]` to `span[1]`: by vectors, then by single elements.

    Without `tail` there is no loop by elements: the last vector may pass the end.
    """
    lo, hi = span
    by_element = indent(body.stores(group, 1), f"for (; i < {hi}; ++i) {{", "}")
    if not body.vectorises:
        return indent([f"int i = {lo};", *by_element], "{", "}")
    stop = f"i + {LANES - 1} < {hi}" if tail else f"i < {hi}"
    by_vector = indent(body.stores(group, LANES), f"for (; {stop}; i += {LANES}) {{", "}")
    return indent([f"int i = {lo};", *by_vector, *(by_element if tail else ())], "{", "}")


def indent(lines: Sequence[str], head: str = "{", foot: str = "}") -> list[str]:
    """Return a block of C: the indented `lines` between `head` and `foot`."""
    return [head, *(f"    {line}" for line in lines), foot]


def _by_element(body: Body, group: Sequence[Store]) -> tuple[list[str], int]:
    nest = body.nest
    count = nest.rows * nest.inner
    stores = body.stores(group, 1)
    if nest.rows == 1:
        head = ["const int i = get_global_id(0);", "if (i >= n) return;"]
        return head + body.row_lines([]) + stores, count
    head = [
        "const int element = get_global_id(0);",
        f"if (element >= rows * {nest.inner}) return;",
        f"const int row = element / {nest.inner}, i = element % {nest.inner};",
    ]
    return head + body.row_lines(body.coordinates("row")) + stores, count
