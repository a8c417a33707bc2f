"""Text of fused elementwise kernels.

A work-item walks whole rows of the innermost dimension, 16 elements at a time (CPU), or computes
element (GPU). Expressions that are constant along a row are computed once per row. The number
of rows is an argument: micro-batches of all sizes have the same text.
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
"""Width of the tile of a work-item that reads across rows."""
LANES = 16
Panels = tuple[str, str]
"""The forms of a product's operands; see `kernels/cpu/matmul.cl`."""
MOST_TENSORS = 24
HELPERS = {
    "exact_erf(": "erf.cl", "exp_minus_square(": "erf.cl", "erf_plus_one(": "erf.cl",
    "exact_sin(": "exact.cl", "exact_cos(": "exact.cl", "exact_tan(": "exact.cl",
    "exact_pow(": "exact.cl", "exact_fmod(": "exact.cl", "exact_exp(": "exp.cl", "gelu(": "gelu.cl",
    "vstore16_at_once(": "store.cl",
}  # fmt: skip
"""The file that defines each function that generated code may call; callers before what they
call."""


@dataclass(frozen=True)
class Kernel:
    """A kernel function of an OpenCL source, specialised by `-D` options."""

    source: str
    name: str
    options: tuple[str, ...] = ()
    generated: bool = False
    """Whether no other text has this name, so that many kernels can share a program."""


@dataclass(frozen=True)
class Launch:
    """One kernel over one range."""

    kernel: Kernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Value | int | float, ...]
    inplace: frozenset[int] = field(default_factory=frozenset)
    """Ids of tensors whose every element is read just before the same element of a result is
    written: a result of the same size may take their memory."""
    apart: frozenset[int] = field(default_factory=frozenset)
    """Ids of tensors, such as scratch memory, that it uses while it reads those `inplace`: they
    never take their memory."""
    steady: bool = False
    """Whether it reads weights alone, and so runs again only for other weights."""
    beside: int = 0
    """0: it runs in the queue of its pass. Else it belongs to a dataflow, the launches from here to
    the next in the pass's queue: they run at once, each in the queue of its number beside the
    pass's, and send to one another through channels. The last receives all that they send."""
    step: int = 0
    """Elements of its results that each step of the first global id completes, in row-major order;
    0 if it completes them in another order."""

    @property
    def touches(self) -> set[int]:
        """Ids of the tensors that it reads or writes."""
        return {arg.id for arg in self.args if isinstance(arg, Value)}


@dataclass(frozen=True, eq=False)
class Tile(Expr):
    """An element of a matrix product, in a register of the kernel that computes it.

    `launches` compute and store the product; to the last of them an epilogue can be added. Where
    its kernel is not generated, `with_stores` makes all of them, from a group and its stores that
    are kept.
    """

    launches: tuple[Launch, ...]
    with_stores: WithStores | None = None
    row_cols: int = 0
    """Up to so many columns a kernel over whole rows can follow in `with_stores`."""
    by_channel: bool = False
    """Whether it is a convolution, whose rows are channels: kernels over all their pixels can."""
    panels: Panels | None = None
    """Of a kernel of the family `cpu`: how it finds the panels of its operands."""


@dataclass(frozen=True)
class Store:
    """Writes `expr` to the elements of `out` that `layout` names."""

    expr: Expr
    out: Value
    layout: Layout

    @property
    def plain(self) -> bool:
        """Whether it fills `out` in order."""
        whole = self.expr.numel == math.prod(self.out.shape)
        return whole and self.layout == Layout.row_major(self.expr.shape)

    @cached_property
    def reads(self) -> frozenset[int]:
        """Ids of the tensors that its expression reads."""
        ids = {load.value.id for load in loads(self.expr)}
        if isinstance(self.expr, Tile):
            ids.update(*(launch.touches for launch in self.expr.launches))
        return frozenset(ids)

    def joins(self, group: Sequence[Store]) -> bool:
        """Whether this store can be in one kernel with `group`, and is faster there.

        Both must have one shape and share tensors. This store may read a tensor that the group
        writes only element by element.
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
        """Whether it reads or overwrites a tensor that `group` writes."""
        touched = self.reads | {self.out.id}
        return any(store.out.id in touched for store in group)


WithStores = Callable[[Sequence[Store], Sequence[Store]], Sequence[Launch]]
"""The launches of a product, with the stores of its group that are kept."""


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
    """Text of a file of `hetpipe.kernels`. Raises `BackendError` if there is none."""
    try:
        return files("hetpipe.kernels").joinpath(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BackendError(f"there is no kernel source {path!r} in hetpipe.kernels") from error


def with_helpers(text: str) -> str:
    """Generated code, after the functions of ours that it calls and does not have yet."""
    for call, file in HELPERS.items():
        if call in text and kernel_source(file) not in text:
            text = f"{kernel_source(file)}\n{text}"
    return text


@cache
def helpers_identity() -> str:
    """A hash of all functions of ours that generated code may call."""
    return key_of({call: kernel_source(file) for call, file in HELPERS.items()})


def generate(group: Sequence[Store], target: Target, kept: Sequence[Store]) -> Code:
    """One kernel for a group of stores of one shape; only those in `kept` go to memory."""
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
    """The kernel's text, named by its own hash."""
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
    # Rows side by side share the cache lines that a step other than 1 touches: walk tiles.
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
    """Loops over `i` from `span[0]` to `span[1]`: by vectors, then the remainder by elements.

    Without `tail` the last vector may pass the end: the caller knows that there is room.
    """
    lo, hi = span
    by_element = indent(body.stores(group, 1), f"for (; i < {hi}; ++i) {{", "}")
    if not body.vectorises:
        return indent([f"int i = {lo};", *by_element], "{", "}")
    stop = f"i + {LANES - 1} < {hi}" if tail else f"i < {hi}"
    by_vector = indent(body.stores(group, LANES), f"for (; {stop}; i += {LANES}) {{", "}")
    return indent([f"int i = {lo};", *by_vector, *(by_element if tail else ())], "{", "}")


def indent(lines: Sequence[str], head: str = "{", foot: str = "}") -> list[str]:
    """A block of C."""
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
