"""Generates reduction kernels, which compute their operands inside their loops.

Sums are deterministic: every work-item adds its elements in order. Long sums are cut into segments,
which work-items add in parallel, with smaller rounding errors. A second kernel adds the segments'
sums in order. The numbers of work-items and of reduced rows are kernel arguments, so micro-batches
of different sizes often share one text. `group_reduce.py` has the form for graphics cards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import chain

from .body import Body, Nest
from .builder import Builder
from .codegen import LANES, finish, indent
from .expr import Const, Expr, Layout, Value, layouts_of, loads, walk
from .group_reduce import reduce_in_groups
from .reductions import ALL, PRODUCT, Reduction
from .signature import C_TYPES

CHAIN = 2048
"""Target length of a chain of additions; longer sums are cut into segments."""
COLUMNS = 8
"""Most neighbouring vectors of columns per work-item."""


def reduce(builder: Builder, expr: Expr, dims: Sequence[int], how: Reduction) -> Value:
    """Reduce `expr` over `dims`; the result has the other dimensions, in order."""
    (value,) = reduce_together(builder, [expr], dims, how)
    return value


def reduce_together(
    builder: Builder, exprs: Sequence[Expr], dims: Sequence[int], how: Reduction
) -> list[Value]:
    """Reduce expressions of one shape; on a graphics card, one kernel reduces all of them."""
    sizes, rank = exprs[0].shape, len(exprs[0].shape)
    kept = [d for d in range(rank) if d not in dims]
    reduced = [d for d in range(rank) if d in dims]
    shape = tuple(sizes[d] for d in kept)
    if 1 in sizes:  # a dimension of size 1 needs no loop
        loops = [d for d in range(rank) if sizes[d] != 1]
        longer = tuple(sizes[d] for d in loops)
        narrow = [builder.view(each, partial(Layout.reshape, shape=longer)) for each in exprs]
        inner = [at for at, d in enumerate(loops) if d in dims]
        values = reduce_together(builder, narrow, inner, how)
        return [builder.reshape(value, shape) for value in values]
    if exprs[0].numel == 0:
        neutral = int(how in (PRODUCT, ALL))
        none = (builder.pool.make(Const, shape, each.dtype, neutral) for each in exprs)
        return list(map(builder.store, none))
    if not reduced:
        return list(map(builder.store, exprs))
    by_rows = _contiguous(exprs, reduced) or not kept
    if by_rows:
        order, borders = kept + reduced, [len(kept)]
    else:
        order, borders = kept[:-1] + reduced + kept[-1:], [len(kept) - 1, rank - 1]
    moved = [builder.view(each, partial(Layout.permute, order=order)) for each in exprs]
    if builder.device.family == "gpu":
        values = reduce_in_groups(builder, moved, shape, borders, by_rows, how)
        if values[0].shape == shape:
            return values
        return reduce_together(builder, list(map(builder.pool.load, values)), [0], how)
    make, count = _by_rows if by_rows else _by_columns, math.prod(sizes[d] for d in reduced)
    nests = (Nest(each.shape, layouts_of(each), borders) for each in moved)
    pairs = zip(moved, nests, strict=True)
    return [make(builder, each, nest, shape, count, how) for each, nest in pairs]


def _contiguous(exprs: Sequence[Expr], reduced: Sequence[int]) -> bool:
    """Return whether most operands have their least stride in a reduced dimension."""
    votes = 0
    for load in dict.fromkeys(chain.from_iterable(map(loads, exprs))):
        strides = [(s, d) for d, s in enumerate(load.layout.strides) if s]
        if strides:
            votes += 1 if min(strides)[1] in reduced else -1
    return votes > 0


def _by_rows(
    builder: Builder, expr: Expr, nest: Nest, shape: tuple[int, ...], count: int, how: Reduction
) -> Value:
    """Reduce along the innermost dimension: a work-item reduces rows, in 16 lanes if possible."""
    inner, outputs = nest.inner, math.prod(shape)
    rows = count // inner
    body = Body(nest)
    wide = inner >= LANES and all(map(body.has_lanes, walk(expr)))
    segments = max(1, -(-count // (CHAIN * (LANES if wide else 1))))
    each_row = each_inner = 0
    if rows > 1:
        each_row = -(-rows // min(segments, rows))
        segments = -(-rows // each_row)
    else:
        each_inner = -(-inner // segments)
        segments = -(-inner // each_inner)
    dtype = expr.dtype
    lanes = _accumulate(body, expr, how, LANES) if wide else []
    single = _accumulate(body, expr, how, 1)
    lo = f"segment * {each_inner}" if each_inner else "0"
    hi = f"min({inner}, ({lo}) + {each_inner})" if each_inner else str(inner)
    numbers = {"items": outputs * segments, "rows": rows, "each": each_row}
    loop = [f"int i = {lo};", f"const int end = {hi};"]
    if wide:
        loop += indent(lanes, f"for (; i + {LANES - 1} < end; i += {LANES}) {{", "}")
    loop += indent(single, "for (; i < end; ++i) {", "}")
    first = "segment * each" if each_row else "0"
    last = f"min(rows, ({first}) + each)" if each_row else "1"
    ctype, start = C_TYPES[dtype], how.start(dtype)
    lines = [
        "const int item = get_global_id(0);",
        "if (item >= items) return;",
        f"const int output = item / {segments}, segment = item % {segments};",
        f"{ctype} sum1 = {start};",
        *([f"{ctype}{LANES} sum{LANES} = ({ctype}{LANES})({start});"] if wide else []),
        *indent(
            [
                "const int row = output * rows + part;",
                *body.row_lines("row"),
                *loop,
            ],
            f"for (int part = {first}; part < {last}; ++part) {{",
            "}",
        ),
        *(_fold(how, dtype) if wide else []),
        "result[item] = sum1;",
    ]
    whole, dim = (shape, None) if segments == 1 else ((*shape, segments), len(shape))
    return _launch(builder, body, lines, whole, dim, numbers, how, dtype)


def _accumulate(body: Body, expr: Expr, how: Reduction, width: int, to: str = "") -> list[str]:
    lines: list[str] = []
    name = body.emit(expr, width, lines, {})
    to = to or f"sum{width}"
    return [*lines, f"{to} = {how.join(expr.dtype, width, to, name)};"]


def _fold(how: Reduction, dtype: str) -> list[str]:
    """Return statements that reduce the 16 lanes in a tree, and then join them with `sum1`."""
    lines, ctype, width = [], C_TYPES[dtype], LANES
    while width > 1:
        half = width // 2
        name = f"sum{half}" if half > 1 else "folded"
        kind = f"{ctype}{half}" if half > 1 else ctype
        joined = how.join(dtype, half, f"sum{width}.lo", f"sum{width}.hi")
        lines.append(f"const {kind} {name} = {joined};")
        width = half
    return [*lines, f"sum1 = {how.join(dtype, 1, 'sum1', 'folded')};"]


def _by_columns(
    builder: Builder, expr: Expr, nest: Nest, shape: tuple[int, ...], count: int, how: Reduction
) -> Value:
    """Reduce along columns: a work-item holds neighbouring columns and walks down the rows."""
    inner = nest.inner
    outer = math.prod(shape) // inner
    segments = max(1, -(-count // CHAIN))
    each = -(-count // segments)
    segments = -(-count // each)
    body = Body(nest)
    vectors = min(COLUMNS, inner // LANES) if all(map(body.has_lanes, walk(expr))) else 0
    block = max(1, vectors * LANES)
    blocks = -(-inner // block)
    lines = [
        "const int item = get_global_id(0);",
        "if (item >= items) return;",
        f"const int block = item % {blocks}, rest = item / {blocks};",
        f"const int output = rest % {outer}, segment = rest / {outer};",
        f"const int begin = block * {block};",
        "const int first = segment * each, last = min(first + each, rows);",
    ]
    put = f"(segment * {outer} + output) * {inner}"
    narrow = _column_loop(body, expr, how, 1, 1, put)
    if vectors:
        wide = _column_loop(body, expr, how, LANES, vectors, put)
        lines += indent(wide, f"if (begin + {block} <= {inner}) {{", "} else {")
        lines += indent(narrow, f"    for (int i = begin; i < {inner}; ++i) {{", "    }")
        lines.append("}")
    else:
        lines += indent(narrow, "const int i = begin; {", "}")
    numbers = {"items": blocks * outer * segments, "rows": count, "each": each}
    whole, dim = (shape, None) if segments == 1 else ((segments, *shape), 0)
    return _launch(builder, body, lines, whole, dim, numbers, how, expr.dtype)


def _column_loop(
    body: Body, expr: Expr, how: Reduction, width: int, vectors: int, put: str
) -> list[str]:
    ctype = C_TYPES[expr.dtype] + (str(width) if width > 1 else "")
    start = f"({ctype})({how.start(expr.dtype)})"
    lines = [f"{ctype} sum_{k} = {start};" for k in range(vectors)]
    inside: list[str] = []
    for k in range(vectors):
        step = _accumulate(body, expr, how, width, f"sum_{k}")
        inside += indent([f"const int i = begin + {k * width};", *step] if width > 1 else step)
    lines += indent(
        [
            "const int row = output * rows + part;",
            *body.row_lines("row"),
            *inside,
        ],
        "for (int part = first; part < last; ++part) {",
        "}",
    )
    for k in range(vectors):
        if width > 1:
            lines.append(f"vstore{width}(sum_{k}, 0, result + {put} + begin + {k * width});")
        else:
            lines.append(f"result[{put} + i] = sum_{k};")
    return lines


def _launch(
    builder: Builder, body: Body, lines: list[str], whole: tuple[int, ...], segments: int | None,
    numbers: dict[str, int], how: Reduction, dtype: str,
) -> Value:  # fmt: skip
    """Launch the kernel for a result of shape `whole`; reduce its dimension `segments`, if given.

    `numbers` are the kernel's int arguments: all items, rows per result and rows per segment.
    """
    out = builder.new(whole, dtype)
    builder.add(finish(lines, (numbers["items"],), (1,), {**body.named, "result": out}, numbers))
    return out if segments is None else reduce(builder, builder.pool.load(out), [segments], how)
