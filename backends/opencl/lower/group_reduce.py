"""Generates reduction kernels for graphics cards, where a work-group computes a result together.

A work-group has several *lanes* for each of its results. A lane is a work-item that reduces every
n-th element; a tree in local memory then joins the lanes. Neighbouring work-items read neighbours
in memory: the lanes of one row, or else the same lane of neighbouring columns. If there are too few
results to fill the card, long sums are cut into segments, which a second kernel adds. All orders
are fixed, so a reduction gives the same bits in each run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .body import Body, Nest
from .builder import Builder
from .codegen import finish, indent
from .expr import Expr, Value, layouts_of
from .reductions import Reduction
from .signature import C_TYPES
from .target import Target

ACROSS = 32
"""Neighbouring columns of a work-group: one line of memory."""
GROUPS_PER_UNIT = 4
"""Work-groups for each compute unit, so that some compute while others wait for memory."""
SHORTEST = 16
"""Least elements of a lane in a segment: storing and adding a shorter segment would cost more."""
LONGEST = 2048
"""Target length of a lane's chain of additions; longer sums are cut into segments."""
AHEAD = 4
"""Elements that a lane loads before it waits for the first."""


def reduce_in_groups(
    builder: Builder, exprs: Sequence[Expr], shape: tuple[int, ...], borders: Sequence[int],
    by_rows: bool, how: Reduction,
) -> list[Value]:  # fmt: skip
    """Reduce expressions to `shape`, or to (segments, *shape) if the sums are cut.

    With `by_rows` the reduced dimensions come last, else directly before the last dimension.
    """
    nest = Nest(exprs[0].shape, layouts_of(*exprs), borders)
    outputs, group = math.prod(shape), builder.device.group
    count = exprs[0].numel // outputs
    lanes = builder.device.lanes(count, group if by_rows else max(1, group // ACROSS))
    across = group // lanes
    segments = _segments(builder.device, -(-outputs // across), count, lanes)
    each = -(-count // segments)
    segments = -(-count // each)
    body = Body(nest)
    dtypes = [expr.dtype for expr in exprs]
    lane, place = ("% {0}", "/ {0}") if by_rows else ("/ {1}", "% {1}")
    lines = [
        *_memory(dtypes, lanes, group),
        "const int local_id = get_local_id(0);",
        f"const int lane = local_id {lane.format(lanes, across)};",
        f"const int place = local_id {place.format(lanes, across)};",
        f"const int item = (int)get_group_id(0) * {across} + place;",
        *(f"{C_TYPES[dtype]} sum{k} = {how.start(dtype)};" for k, dtype in enumerate(dtypes)),
        *indent(_loop(body, exprs, lanes, by_rows, how), "if (item < items) {", "}"),
        *_tree(dtypes, lanes, 1 if by_rows else across, how),
        "if (lane != 0 || item >= items) return;",
        *(f"result{k}[item] = sum{k};" for k in range(len(dtypes))),
    ]
    whole = shape if segments == 1 else (segments, *shape)
    results = {f"result{k}": builder.new(whole, dtype) for k, dtype in enumerate(dtypes)}
    items = outputs * segments
    rows = count // nest.inner if by_rows else count
    numbers = {"items": items, "outputs": outputs, "count": count, "rows": rows, "each": each}
    size = -(-items // across) * group
    builder.add(finish(lines, (size,), (group,), {**body.named, **results}, numbers))
    return list(results.values())


def _segments(device: Target, groups: int, count: int, lanes: int) -> int:
    """Return the segments of each sum: enough to fill the card and for short chains."""
    filling = -(-GROUPS_PER_UNIT * device.compute_units // groups)
    return max(1, min(filling, count // (lanes * SHORTEST)), -(-count // (lanes * LONGEST)))


def _loop(
    body: Body, exprs: Sequence[Expr], lanes: int, by_rows: bool, how: Reduction
) -> list[str]:
    """Return a lane's loop over its segment; element `at` of an output is in row `row` at `i`."""
    inside: list[str] = []
    memo: dict[Expr, str] = {}
    names = [body.emit(expr, 1, inside, memo) for expr in exprs]
    for k, (expr, name) in enumerate(zip(exprs, names, strict=True)):
        inside.append(f"sum{k} = {how.join(expr.dtype, 1, f'sum{k}', name)};")
    inner = body.nest.inner
    head = "output * rows + at / {0}, i = at % {0}" if by_rows else "output / {0} * rows + at"
    steps = [f"const int row = {head.format(inner)};", *body.row_lines("row"), *inside]
    return [
        "const int output = item % outputs, begin = item / outputs * each;",
        *([] if by_rows else [f"const int i = output % {inner};"]),
        "const int end = min(begin + each, count);",
        f"#pragma unroll {AHEAD}",
        *indent(steps, f"for (int at = begin + lane; at < end; at += {lanes}) {{", "}"),
    ]


def _memory(dtypes: Sequence[str], lanes: int, group: int) -> list[str]:
    """Return the declarations of the trees' local memory."""
    if lanes == 1:
        return []
    return [f"__local {C_TYPES[dtype]} tree{k}[{group}];" for k, dtype in enumerate(dtypes)]


def _tree(dtypes: Sequence[str], lanes: int, stride: int, how: Reduction) -> list[str]:
    """Return statements that join the lanes' sums in lane 0; lanes are `stride` items apart."""
    if lanes == 1:
        return []
    joins = []
    for k, dtype in enumerate(dtypes):
        mine, other = f"tree{k}[local_id]", f"tree{k}[local_id + apart * {stride}]"
        joins.append(f"{mine} = {how.join(dtype, 1, mine, other)};")
    return [
        *(f"tree{k}[local_id] = sum{k};" for k in range(len(dtypes))),
        *indent(
            ["barrier(CLK_LOCAL_MEM_FENCE);", *indent(joins, "if (lane < apart) {", "}")],
            f"for (int apart = {lanes // 2}; apart > 0; apart /= 2) {{",
            "}",
        ),
        *(f"sum{k} = tree{k}[local_id];" for k in range(len(dtypes))),
    ]
