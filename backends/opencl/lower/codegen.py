"""Generates the text of fused elementwise kernels.

On a GPU a work-item computes one element. Elsewhere it computes rows along the innermost dimension,
16 elements at a time. An expression that is constant along a row is computed once per row. The
number of rows is an argument, so micro-batches of all sizes share one text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .body import Body, Nest
from .expr import Load, Value, layouts_of, loads, walk
from .launch import Kernel, Launch, Store
from .signature import pointed
from .target import Target

BLOCK = 4096
"""Elements per work-item, except on a GPU: enough to hide the cost of a work-group."""
TILE = 256
"""Columns per work-item if the elements of a row are not neighbours in memory."""
LANES = 16


def generate(group: Sequence[Store], target: Target, kept: Sequence[Store]) -> Launch:
    """Return the launch for a group of stores of one shape; only stores in `kept` write memory."""
    exprs = list(walk(*(store.expr for store in group)))
    nest = Nest(group[0].expr.shape, [*layouts_of(*exprs), *(store.layout for store in group)])
    body = Body(nest, {store.out.id: store.expr for store in group})
    body.vectorises = nest.inner >= (2 if nest.rows == 1 else LANES) and all(
        map(body.has_lanes, exprs)
    )
    if target.family == "gpu":
        lines, count = _by_element(body, kept)
        width = target.group
        size = (-(-count // width) * width,)
        local = (width,)
    else:
        # A vector may pass the end of a tensor, because `GRANULE_NBYTES` pads each tensor's memory.
        reads = [item for item in exprs if isinstance(item, Load)]
        straight = all(item.plain or body.still(item) for item in reads)
        padded = straight and all(store.plain for store in group) and not target.checks_memory
        lines, count = _by_row(body, kept, padded)
        size, local = (count,), (1,)
    number = {"n": nest.inner} if nest.rows == 1 else {"rows": nest.rows}
    launch = finish(lines, size, local, body.named, number)
    read = [load for store in group for load in loads(store.expr)]
    crooked = {load.value.id for load in read if not load.plain}
    if all(store.plain for store in group):
        return replace(launch, inplace=frozenset({load.value.id for load in read} - crooked))
    return launch


def finish(
    lines: Sequence[str], global_size: tuple[int, ...], local_size: tuple[int, ...],
    tensors: Mapping[str, Value], numbers: Mapping[str, int],
) -> Launch:  # fmt: skip
    """Return a launch of a new kernel with the statements `lines`, named by a hash of its text."""
    parameters = [f"__global {pointed(value.dtype)} *{name}" for name, value in tensors.items()]
    parameters += [f"const int {name}" for name in numbers]
    inside = "\n".join(f"    {line}" for line in lines)
    signature = ",\n    ".join(parameters)
    digest = hashlib.sha256((signature + inside).encode()).hexdigest()[:16]
    name = f"fused_{digest}"
    text = f"__kernel void {name}(\n    {signature})\n{{\n{inside}\n}}\n"
    args: tuple[Value | int | float, ...] = (*tensors.values(), *numbers.values())
    return Launch(Kernel(text, name, generated=True), global_size, local_size, args)


def _by_row(body: Body, group: Sequence[Store], padded: bool) -> tuple[list[str], int]:
    nest = body.nest
    if nest.rows == 1:
        head = [
            f"const int begin = get_global_id(0) * {BLOCK};",
            f"const int end = min(begin + {BLOCK}, n);",
        ]
        loops = _loops(body, group, not padded)
        return head + body.row_lines() + loops, -(-nest.inner // BLOCK)
    # If elements of a row are not neighbours in memory, rows share cache lines: walk in tiles.
    crooked = any(nest.step(layout) not in (0, 1) for layout in nest.layouts)
    span = min(nest.inner, TILE if crooked else BLOCK)
    each = max(1, BLOCK // span)
    blocks = -(-nest.inner // span)
    loops = _loops(body, group, nest.inner % LANES != 0)
    lines = [
        f"const int first = get_global_id(0) / {blocks} * {each};",
        f"const int begin = get_global_id(0) % {blocks} * {span};",
        f"const int end = min(begin + {span}, {nest.inner});",
        *indent(
            body.row_lines("row") + loops,
            f"for (int row = first; row < min(first + {each}, rows); ++row) {{",
            "}",
        ),
    ]
    return lines, -(-nest.rows // each) * blocks


def _loops(body: Body, group: Sequence[Store], tail: bool) -> list[str]:
    """Return loops over `i` from `begin` to `end`: by vectors and, with `tail`, by elements."""
    by_element = indent(body.stores(group, 1), "for (; i < end; ++i) {", "}")
    if not body.vectorises:
        return indent(["int i = begin;", *by_element], "{", "}")
    stop = f"i + {LANES - 1} < end" if tail else "i < end"
    by_vector = indent(body.stores(group, LANES), f"for (; {stop}; i += {LANES}) {{", "}")
    return indent(["int i = begin;", *by_vector, *(by_element if tail else ())], "{", "}")


def indent(lines: Sequence[str], head: str = "{", foot: str = "}") -> list[str]:
    """Return a block of C: the indented `lines` between `head` and `foot`."""
    return [head, *(f"    {line}" for line in lines), foot]


def _by_element(body: Body, group: Sequence[Store]) -> tuple[list[str], int]:
    nest = body.nest
    count = nest.rows * nest.inner
    stores = body.stores(group, 1)
    if nest.rows == 1:
        head = ["const int i = get_global_id(0);", "if (i >= n) return;"]
        return head + body.row_lines() + stores, count
    head = [
        "const int element = get_global_id(0);",
        f"if (element >= rows * {nest.inner}) return;",
        f"const int row = element / {nest.inner}, i = element % {nest.inner};",
    ]
    return head + body.row_lines("row") + stores, count
