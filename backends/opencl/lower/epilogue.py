"""Fuses elementwise operators with a matrix product: they run while its tile is in registers.

A product and the stores that follow it form one group. The first store writes the product: its
expression is a `Tile`. The other stores, the epilogue, read the product element by element.

Users' kernels and the families gpu and fpga apply an epilogue by macros, which the program defines
before the source. The source ends its parameters with `RESULTS` and writes every element once, by
`STORE(element, value)`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .body import Body, Nest
from .codegen import LANES, indent
from .expr import Layout, Pool, Rows, Shape, Value, layouts_of, loads, walk
from .launch import (
    MOST_TENSORS,
    Kernel,
    Launch,
    Panels,
    Store,
    Tile,
    WithStores,
    kernel_source,
    with_helpers,
)
from .signature import C_TYPES, Argument, bind, parameters, pointed
from .target import Target

STORES_NOTHING = "#define RESULTS __global float *unused\n#define STORE(element, value)\n#line 1\n"
"""Macros for the packing kernels of a source with `STORE`."""


def is_product(group: Sequence[Store]) -> bool:
    """Return whether a group is a product with its epilogue."""
    return isinstance(group[0].expr, Tile)


def fitted(pool: Pool, store: Store, group: Sequence[Store]) -> Store | None:
    """Return `store` as a store of a product's epilogue, or None if it cannot join the group.

    The store must read a result of the group, only element by element and in the product's order,
    and its rows must end where the product's rows end. It may write the rows in another order.
    """
    tile = group[0].expr
    assert isinstance(tile, Tile)
    if _closed(group):
        return None
    written = {other.out.id: other.plain for other in group}
    mine = [load for load in loads(store.expr) if load.value.id in written]
    if not mine or not store.plain or not all(written[load.value.id] for load in mine):
        return None
    order = mine[0].layout.order()
    shape = group[1].expr.shape if len(group) > 1 else tuple(store.expr.shape[d] for d in order)

    def view(layout: Layout) -> Layout | None:
        return layout.permute(order).reshape(shape)

    expr, layout = pool.view(store.expr, view), view(store.layout)
    if expr is None or layout is None or expr.numel != tile.numel:
        return None
    if not all(load.plain for load in loads(expr) if load.value.id in written):
        return None
    seen = Store(expr, store.out, layout)
    stores = [*group[1:], seen]
    if len(set(written).union(*(other.reads | {other.out.id} for other in stores))) >= MOST_TENSORS:
        return None
    if tile.with_stores is not None:
        return seen if seen.plain else None
    nest = _nest(shape, tile.shape[-1], stores)
    if nest is None or not all(map(Body(nest).has_lanes, walk(expr))) or nest.step(layout) != 1:
        return None
    return seen


def follow(groups: list[list[Store]], results: Sequence[Store]) -> bool:
    """Add the `results` of a kernel over rows to the group of the product that the kernel reads.

    Return whether that succeeded: the product must wait in `groups` and have few enough columns,
    and no later group may depend on it. Afterwards nothing else can join the group.
    """
    rows = results[0].expr
    assert isinstance(rows, Rows)
    for at, group in enumerate(groups):
        tile = group[0].expr
        if rows.source.value.id not in {store.out.id for store in group}:
            continue
        later = [store for others in groups[at + 1 :] for store in others]
        if not isinstance(tile, Tile) or any(store.follows(group) for store in later):
            return False
        if _closed(group) or not _sends(tile, rows):
            return False
        del groups[at]
        groups.append([*group, *results])
        return True
    return False


def _sends(tile: Tile, rows: Rows) -> bool:
    """Return whether a kernel over rows reads a product's rows, and the rows are short enough."""
    source = rows.source
    if not source.plain or source.numel != tile.numel or rows.by_channel != tile.by_channel:
        return False
    if rows.by_channel:
        return source.shape[:2] == tile.shape[:2]
    return source.shape[-1] == tile.shape[-1] <= tile.row_cols


def _closed(group: Sequence[Store]) -> bool:
    return isinstance(group[-1].expr, Rows)


def launches(group: Sequence[Store], kept: Sequence[Store], target: Target) -> list[Launch]:
    """Return the launches that compute a product and write the stores `kept` of its group."""
    tile = group[0].expr
    assert isinstance(tile, Tile)
    if list(kept) == [group[0]]:
        return list(tile.launches)
    if tile.with_stores is not None:
        return list(tile.with_stores(group, kept))
    *before, last = tile.launches
    product = group[0].out
    names = (parameter.name for parameter in parameters(last.kernel))
    args = dict(zip(names, last.args, strict=True))
    shape = group[1].expr.shape
    nest = _nest(shape, product.shape[-1], group[1:])
    assert nest is not None, "stores join only if they have a nest"
    written = {store.out.id: store.expr for store in group if store.plain}
    body = Body(nest, written, {tile: "sum"})
    whole = replace(group[0], layout=Layout.row_major(shape))
    stores = [whole if store is group[0] else store for store in kept]
    by_vector = ["const float16 sum = sums16;", *body.stores(stores, LANES)]
    tail = nest.inner % LANES != 0
    by_element = ["const float sum = lane[i - first];", *body.stores(stores, 1)] if tail else []
    in_order = [value for value in body.named.values() if math.prod(value.shape) == tile.numel]
    turned = {store.out.id for store in stores if not store.plain}
    pointers = [body.tensor(value) for value in in_order if value.id not in turned]
    signature = ["PRODUCT(const float* c)"]
    signature += [f"__global {pointed(value.dtype)} *{name}" for name, value in body.named.items()]
    assert tile.panels is not None
    row = body.row_lines("row")
    lines = _lines(tile.panels, pointers, row, by_vector, by_element)
    kernel = _kernel(signature, lines, target)
    # Sums of earlier blocks are in memory as `c`. The first block reads none: any tensor serves.
    carries = args["k0"] != 0
    if not carries:
        args["c"] = args["left"]
    read = [load for store in group[1:] for load in loads(store.expr)]
    inplace = {load.value.id for load in read} | ({product.id} if carries else set())
    inplace -= {load.value.id for load in read if not load.plain}
    # If rows change their order, a store could overwrite elements that the kernel reads later.
    if turned:
        inplace = set()
    apart = last.touches - {product.id}
    size, local = last.global_size, last.local_size
    bound = (*args.values(), *body.named.values())
    alike = frozenset(inplace - apart)
    step = 0 if turned else last.step
    return [*before, Launch(kernel, size, local, bound, alike, frozenset(apart), step=step)]


def _nest(shape: Shape, cols: int, stores: Sequence[Store]) -> Nest | None:
    """Return loops whose innermost one is a row of the product, or None."""
    inner, d = 1, len(shape)
    while d > 0 and inner < cols:
        d -= 1
        inner *= shape[d]
    leaves = layouts_of(*(store.expr for store in stores))
    places = [store.layout for store in stores]
    nest = Nest(shape, [*leaves, *places, Layout.row_major(shape)], borders=[d])
    return nest if nest.inner == cols else None


def _lines(
    panels: Panels, pointers: Sequence[str], row: list[str], by_vector: list[str],
    by_element: list[str],
) -> list[str]:  # fmt: skip
    asked = [f"PREFETCH({name} + at);" for name in pointers]
    asked += [f"if (col0 + LANES < cols) PREFETCH({name} + at + LANES);" for name in pointers]
    rows = "for (int m = 0; m < row_count; m++) {"
    inside = ["int i = col0 + n * LANES;", "const float16 sums16 = sums[m][n];"]
    inside += indent(by_vector, "if (i + LANES <= cols) {")
    if by_element:
        loop = indent(by_element, "for (; i < cols; ++i) {")
        inside[-1] = "} else {"
        inside += ["    const int first = i;", "    float lane[LANES];"]
        inside += ["    vstore16(sums16, 0, lane);", *(f"    {line}" for line in loop), "}"]
    tile = [
        f"__global const float* a = LEFT_PANEL({panels[0]});",
        f"FETCH_NEXT({panels[1]});",
        "const int row_count = min(rows - row0, ROWS);",
        *indent(["const int at = (batch * rows + row0 + m) * cols + col0;", *asked], rows),
        "float16 sums[ROWS][2];",
        f"multiply_rows(a, STEPS({panels[0]}), b, row_count, k1 - k0, sums);",
        "FINISH(sums);",
        *indent(
            [
                "const int row = batch * rows + row0 + m;",
                *row,
                *indent(inside, "for (int n = 0; n < 2; n++) {"),
            ],
            rows,
        ),
    ]
    column = [
        f"__global const float* b = RIGHT_PANEL({panels[1]});",
        *indent(tile, "for (int row0 = first_row; row0 < last_row; row0 += ROWS) {"),
    ]
    cols = "for (int col0 = first_col; col0 < last_col; col0 += COLS) {"
    return ["PART;", *indent(column, cols)]


def _kernel(signature: Sequence[str], lines: Sequence[str], target: Target) -> Kernel:
    text = "(\n    " + ",\n    ".join(signature) + ")\n{\n    " + "\n    ".join(lines) + "\n}\n"
    name = f"matmul_{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    # Kernels that share a program share these definitions.
    defines = "".join(f"#define {name}\n" for name in target.defines)
    shared = kernel_source("cpu/common.cl") + kernel_source("cpu/matmul.cl")
    head = f"#ifndef EPILOGUE\n#define EPILOGUE\n{defines}{shared}#endif\n"
    return Kernel(f"{head}WORK_ITEM __kernel void {name}{text}", name, generated=True)


@dataclass(frozen=True, eq=False)
class OwnLaunch:
    """A launch of a source with `STORE`, which lacks only its stores."""

    kernel: Kernel
    arguments: Mapping[str, Argument]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None

    def with_stores(self, group: Sequence[Store], kept: Sequence[Store]) -> list[Launch]:
        """Return the launches that write `kept`; the kernel's result is the first of `group`."""
        text, results = macros(group, kept)
        kernel = replace(self.kernel, source=f"{text}#line 1\n{self.kernel.source}")
        args = bind(kernel, {**self.arguments, **results})
        inplace, apart = overwritable(group, self.arguments)
        return [Launch(kernel, self.global_size, self.local_size, args, inplace, apart)]


def alone(with_stores: WithStores, out: Value) -> tuple[Launch, ...]:
    """Return the launches that write only a kernel's result, without an epilogue."""
    store = Store(Tile(out.shape, out.dtype, ()), out, Layout.row_major(out.shape))
    return tuple(with_stores([store], [store]))


def overwritable(
    group: Sequence[Store], arguments: Mapping[str, Argument]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ids of tensors that results may overwrite, and the ids of the kernel's tensors.

    Only the epilogue reads the former tensors, each element just before it is overwritten.
    """
    read = [load for store in group[1:] for load in loads(store.expr)]
    own = frozenset(value.id for value in arguments.values() if isinstance(value, Value))
    crooked = {load.value.id for load in read if not load.plain}
    return frozenset({load.value.id for load in read} - own - crooked), own


def macros(
    group: Sequence[Store], kept: Sequence[Store], given: Value | None = None
) -> tuple[str, dict[str, Argument]]:
    """Return the text of RESULTS and STORE, and the tensors that RESULTS declares, by name.

    With `given`, the result of one of the stores, STORE returns the element's value in `given`.
    """
    result, shape = group[0].expr, group[-1].expr.shape
    whole = Layout.row_major(shape)
    nest = Nest(shape, [*layouts_of(*(store.expr for store in group)), whole])
    body = Body(nest, {store.out.id: store.expr for store in group}, {result: "stored"})
    returned = None
    if given is not None:
        returned = next(store.expr for store in group if store.out.id == given.id)
    stores = body.stores([replace(store, layout=whole) for store in kept], 1, returned)
    inner = nest.inner
    lines = [f"const int row = element / {inner}, i = element % {inner};"]
    if nest.rows == 1:  # without the length, results of all sizes share one text
        lines = ["const int row = 0, i = element;"]
    lines += [*body.row_lines("row"), *stores]
    pointers = {name: f"__global {pointed(value.dtype)} *" for name, value in body.named.items()}
    declared = [f"{pointer}{name}" for name, pointer in pointers.items()]
    declared += ["const int element", f"const {C_TYPES[result.dtype]} stored"]
    head = f"inline {'void' if given is None else 'float'} store_element({', '.join(declared)}) {{"
    results = ", ".join(f"{pointer}result_{name}" for name, pointer in pointers.items())
    passed = "".join(f"result_{name}, " for name in pointers)
    text = with_helpers("\n".join(indent(lines, head, "}")))
    text += f"\n#define RESULTS {results or 'const int result_none'}\n"
    text += f"#define STORE(element, value) store_element({passed}element, value)\n"
    if not body.named:
        return text, {"result_none": 0}
    return text, {f"result_{name}": value for name, value in body.named.items()}
