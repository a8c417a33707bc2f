"""Generates reduction kernels, which compute their operands inside their loops.

Sums are deterministic: every work-item adds its elements in order. Long sums are cut into segments,
which work-items add in parallel, with smaller rounding errors. A second kernel adds the segments'
sums in order. The numbers of work-items and of reduced rows are kernel arguments, so micro-batches
of different sizes often share one text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from .body import Body, Nest, type_names
from .builder import Builder
from .codegen import LANES, finish, indent
from .expr import Const, Expr, Layout, Value, layouts_of, loads, walk
from .signature import C_TYPES

CHAIN = 2048
"""Target length of a chain of additions; longer sums are cut into segments."""
COLUMNS = 8
"""Most neighbouring vectors of columns per work-item."""


@dataclass(frozen=True)
class Reduction:
    """C code that reduces two elements to one; `start` is the neutral element."""

    code: str
    start: str


SUM = Reduction("{0} + {1}", "0")
PRODUCT = Reduction("{0} * {1}", "1")
ANY = Reduction("{0} | {1}", "0")
ALL = Reduction("{0} & {1}", "1")
MAXIMUM = Reduction("select({0}, {1}, convert_{M}(({0} < {1}) | ({1} != {1})))", "LOWEST")
MINIMUM = Reduction("select({0}, {1}, convert_{M}(({0} > {1}) | ({1} != {1})))", "HIGHEST")
EXTREMES = {
    "float32": ("-INFINITY", "INFINITY"), "float64": ("-INFINITY", "INFINITY"),
    "int64": ("LONG_MIN", "LONG_MAX"), "int32": ("INT_MIN", "INT_MAX"),
    "int16": ("SHRT_MIN", "SHRT_MAX"), "int8": ("CHAR_MIN", "CHAR_MAX"),
    "uint8": ("0", "UCHAR_MAX"), "bool": ("0", "1"),
}  # fmt: skip


def reduce(builder: Builder, expr: Expr, dims: Sequence[int], how: Reduction) -> Value:
    """Reduce `expr` over `dims`; the result has the other dimensions, in order."""
    rank = len(expr.shape)
    kept = [d for d in range(rank) if d not in dims]
    reduced = [d for d in range(rank) if d in dims]
    shape = tuple(expr.shape[d] for d in kept)
    if 1 in expr.shape:  # a dimension of size 1 needs no loop
        loops = [d for d in range(rank) if expr.shape[d] != 1]
        sizes = tuple(expr.shape[d] for d in loops)
        narrow = builder.view(expr, partial(Layout.reshape, shape=sizes))
        inner = [at for at, d in enumerate(loops) if d in dims]
        return builder.reshape(reduce(builder, narrow, inner, how), shape)
    if expr.numel == 0:
        neutral = int(how in (PRODUCT, ALL))
        return builder.store(builder.pool.make(Const, shape, expr.dtype, neutral))
    if not reduced:
        return builder.store(expr)
    if _contiguous(expr, reduced) or not kept:
        order, borders, make = kept + reduced, [len(kept)], _by_rows
    else:
        order, borders = kept[:-1] + reduced + kept[-1:], [len(kept) - 1, rank - 1]
        make = _by_columns
    moved = builder.view(expr, partial(Layout.permute, order=order))
    nest = Nest(moved.shape, layouts_of(moved), borders)
    count = math.prod(expr.shape[d] for d in reduced)
    return make(builder, moved, nest, shape, count, how)


def _contiguous(expr: Expr, reduced: Sequence[int]) -> bool:
    """Return whether most operands have their least stride in a reduced dimension."""
    votes = 0
    for load in loads(expr):
        strides = [(s, d) for d, s in enumerate(load.layout.strides) if s]
        if strides:
            votes += 1 if min(strides)[1] in reduced else -1
    return votes > 0


def _start(how: Reduction, dtype: str) -> str:
    low, high = EXTREMES[dtype]
    return how.start.replace("LOWEST", low).replace("HIGHEST", high)


def _join(how: Reduction, dtype: str, width: int, a: str, b: str) -> str:
    return how.code.format(a, b, **type_names(dtype, width))


def _by_rows(
    builder: Builder, expr: Expr, nest: Nest, shape: tuple[int, ...], count: int, how: Reduction
) -> Value:
    """Reduce along the innermost dimension: a work-item reduces rows, in 16 lanes if possible."""
    inner, outputs = nest.inner, math.prod(shape)
    rows = count // inner
    body = Body(nest)
    wide = builder.device.kind != "gpu" and inner >= LANES and all(map(body.has_lanes, walk(expr)))
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
    ctype, start = C_TYPES[dtype], _start(how, dtype)
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
    return [*lines, f"{to} = {_join(how, expr.dtype, width, to, name)};"]


def _fold(how: Reduction, dtype: str) -> list[str]:
    """Return statements that reduce the 16 lanes in a tree, and then join them with `sum1`."""
    lines, ctype, width = [], C_TYPES[dtype], LANES
    while width > 1:
        half = width // 2
        name = f"sum{half}" if half > 1 else "folded"
        kind = f"{ctype}{half}" if half > 1 else ctype
        joined = _join(how, dtype, half, f"sum{width}.lo", f"sum{width}.hi")
        lines.append(f"const {kind} {name} = {joined};")
        width = half
    return [*lines, f"sum1 = {_join(how, dtype, 1, 'sum1', 'folded')};"]


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
    vectors = 0 if builder.device.kind == "gpu" else vectors
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
    start = f"({ctype})({_start(how, expr.dtype)})"
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
    local = min(64, builder.device.max_work_group_size) if builder.device.kind == "gpu" else 1
    size = (-(-numbers["items"] // local) * local,)
    builder.add(finish(lines, size, (local,), {**body.named, "result": out}, numbers))
    return out if segments is None else reduce(builder, builder.pool.load(out), [segments], how)
