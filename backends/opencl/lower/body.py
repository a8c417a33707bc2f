"""Writes the C statements that compute expressions, for one element or for 16 neighbours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from .expr import DEAR, Apply, Const, Coord, Expr, Layout, Load, Shape, Value, children
from .launch import Store
from .signature import C_TYPES, MASKS, literal, vector


class Body:
    """Emits a kernel's statements; collects its tensors and the statements that run once per row.

    `written` maps each tensor that the kernel stores to its expression, which replaces loads of
    the tensor. `held` maps expressions that the kernel has already computed to their variables.
    """

    def __init__(
        self,
        nest: Nest,
        written: Mapping[int, Expr] | None = None,
        held: Mapping[Expr, str] | None = None,
    ) -> None:
        self.nest = nest
        self.named: dict[str, Value] = {}
        self.vectorises = True
        self._written = written or {}
        self._held = held or {}
        self._names: dict[tuple[int, str], str] = {}
        self._row: list[str] = []
        self._bases: dict[Layout, str] = {}
        self._hoisted: dict[Expr, str] = {}
        self._still: dict[Expr, bool] = {}
        self._uses: Counter[Expr] = Counter()
        self._computes = False

    def tensor(self, value: Value) -> str:
        """Return the name of the parameter that points to `value`."""
        key = (value.id, value.dtype)
        if key not in self._names:
            self._names[key] = f"p{len(self._names)}"
            self.named[self._names[key]] = value
        return self._names[key]

    def row_lines(self, row: str = "") -> list[str]:
        """Return the statements at the start of a row. Call this after all other methods.

        If there are several rows, `row` is the variable with the row's number. The statements split
        the number into coordinates c0, c1, ....
        """
        lines, rest = [], self.nest.rows
        for d, size in enumerate(self.nest.shape[:-1] if row else ()):
            rest //= size
            whole = row if rest == 1 else f"{row} / {rest}"
            lines.append(f"const int c{d} = {whole}{f' % {size}' if d else ''};")
        return lines + self._row

    def stores(self, group: Sequence[Store], width: int, returned: Expr | None = None) -> list[str]:
        """Return C statements that store `width` elements from `i` on, then return `returned`."""
        lines: list[str] = []
        memo: dict[Expr, str] = {}
        ends = [store.expr for store in group]
        self._survey(ends if returned is None else [*ends, returned])
        names = [self.emit(store.expr, width, lines, memo) for store in group]
        # All reads come before the first write: a result may share memory with an operand.
        last = [] if returned is None else [f"return {self.emit(returned, width, lines, memo)};"]
        puts = zip(group, names, strict=True)
        return lines + [self._put(store, name, width) for store, name in puts] + last

    def emit(self, expr: Expr, width: int, lines: list[str], memo: dict[Expr, str]) -> str:
        """Append the statements that compute `expr`, and return its variable."""
        if expr in self._held:
            return self._held[expr]
        if expr in memo:
            return memo[expr]
        source = self._source(expr)
        if source is not expr:
            memo[expr] = self.emit(source, width, lines, memo)
            return memo[expr]
        ctype = C_TYPES[expr.dtype]
        if self.still(expr):
            code = self._hoist(expr)
            if width > 1:
                code = f"({vector(ctype, width)})({code})"
        else:
            code = self._code(expr, width, lines, memo)
        name = f"v{len(memo)}"
        memo[expr] = name
        lines.append(f"const {vector(ctype, width)} {name} = {code};")
        return name

    def _survey(self, ends: Sequence[Expr]) -> None:
        """Count the uses of each expression under `ends`; note whether a function is costly."""
        stack = list(map(self._source, ends))
        self._uses = Counter(stack)
        seen: set[Expr] = set()
        while stack:
            expr = stack.pop()
            if expr not in seen and expr not in self._held:
                seen.add(expr)
                arguments = list(map(self._source, children(expr)))
                self._uses.update(arguments)
                stack += arguments
        self._computes = any(isinstance(expr, Apply) and expr.weight >= DEAR for expr in seen)

    def still(self, expr: Expr) -> bool:
        """Return whether `expr` has one value for the whole row."""
        expr = self._source(expr)
        if expr not in self._still:
            fixed = not isinstance(expr, (Load, Coord)) or self.nest.step(expr.layout) == 0
            fixed = fixed and expr not in self._held
            self._still[expr] = fixed and all(map(self.still, children(expr)))
        return self._still[expr]

    def has_lanes(self, expr: Expr) -> bool:
        """Return whether 16 neighbours of `expr` can be computed as one vector."""
        if not isinstance(expr, Load) or not expr.indices or self.still(expr):
            return True
        straight = self.nest.step(expr.layout) == 1
        return straight and all(self.still(index) for index, _, _ in expr.indices)

    def _source(self, expr: Expr) -> Expr:
        """Return the stored expression if `expr` loads a tensor that this kernel stores."""
        while isinstance(expr, Load) and expr.plain and expr.value.id in self._written:
            expr = self._written[expr.value.id]
        return expr

    def _hoist(self, expr: Expr) -> str:
        expr = self._source(expr)
        if isinstance(expr, Const):
            # `select` and other functions need arguments of one type; C has literals of few types.
            return f"({C_TYPES[expr.dtype]})({literal(expr.number, expr.dtype)})"
        if expr not in self._hoisted:
            code = self._code(expr, 1, self._row, self._hoisted)
            self._hoisted[expr] = f"r{len(self._hoisted)}"
            self._row.append(f"const {C_TYPES[expr.dtype]} {self._hoisted[expr]} = {code};")
        return self._hoisted[expr]

    def _code(self, expr: Expr, width: int, lines: list[str], memo: dict[Expr, str]) -> str:
        ctype = C_TYPES[expr.dtype]
        if isinstance(expr, Apply):
            alone = expr.alone and self._uses[self._source(expr.args[-1])] == 1
            code, needed = (expr.alone, expr.args[:-1]) if alone else (expr.code, expr.args)
            if lines is self._row:
                args = list(map(self._hoist, needed))
            else:
                args = [self.emit(arg, width, lines, memo) for arg in needed]
            return code.format(*args, **type_names(expr.dtype, width))
        if isinstance(expr, Coord):
            return self._coordinate(expr, ctype, width)
        assert isinstance(expr, Load)
        if expr.indices:
            return self._gather(expr, width, lines, memo)
        return self._load(expr, ctype, width)

    def _coordinate(self, expr: Coord, ctype: str, width: int) -> str:
        at = self._at(expr.layout)
        if width == 1:
            return f"({ctype})({at})"
        kind = vector(ctype, width)
        step = self.nest.step(expr.layout)
        lanes = ", ".join(str(lane * step) for lane in range(width))
        return f"({kind})({at}) + ({kind})({lanes})"

    def _load(self, expr: Load, ctype: str, width: int) -> str:
        pointer, at = self.tensor(expr.value), self._at(expr.layout)
        step, half = self.nest.step(expr.layout), expr.dtype == "float16"
        if width == 1:
            return _element(pointer, at, half)
        if step == 1:
            return f"vload{'_half' if half else ''}{width}(0, {pointer} + {at})"
        places = (f"{at} + {lane * step}" for lane in range(width))
        elements = ", ".join(_element(pointer, place, half) for place in places)
        return f"({vector(ctype, width)})({elements})"

    def _gather(self, expr: Load, width: int, lines: list[str], memo: dict[Expr, str]) -> str:
        """Return the code of an indexed element; an index out of range gives NaN, or integer 0."""
        at, valid = self._at(expr.layout), []
        for index, stride, size in expr.indices:
            fixed = lines is self._row or self.still(index)
            name = self._hoist(index) if fixed else self.emit(index, 1, lines, memo)
            valid.append(f"{name} >= -{size} && {name} < {size}")
            at += f" + (int)({name} < 0 ? {name} + {size} : {name}) * {stride}"
        pointer, ctype = self.tensor(expr.value), C_TYPES[expr.dtype]
        outside = "NAN" if expr.dtype.startswith("float") else "0"
        inside = f"{pointer}[{at}]" if width == 1 else f"vload{width}(0, {pointer} + {at})"
        return f"({' && '.join(valid)}) ? {inside} : ({vector(ctype, width)})({outside})"

    def _put(self, store: Store, name: str, width: int) -> str:
        pointer, at = self.tensor(store.out), self._at(store.layout)
        step, half = self.nest.step(store.layout), store.out.dtype == "float16"
        if width == 1:
            return _assignment(pointer, at, name, half)
        if step == 1:
            if self._computes and C_TYPES[store.out.dtype] == "float" and not half:
                return f"vstore16_at_once({name}, {pointer} + {at});"
            return f"vstore{'_half' if half else ''}{width}({name}, 0, {pointer} + {at});"
        return " ".join(
            _assignment(pointer, f"{at} + {lane * step}", f"{name}.s{lane:x}", half)
            for lane in range(width)
        )

    def _at(self, layout: Layout) -> str:
        """Return the code of `layout`'s offset at element `i` of the row, in elements."""
        if layout not in self._bases:
            outer = self.nest.strides[layout][:-1]
            terms = [f"c{d} * {s}" for d, s in enumerate(outer) if s]
            if layout.offset or not terms:
                terms.append(str(layout.offset))
            base = f"b{len(self._bases)}"
            self._bases[layout] = base
            self._row.append(f"const int {base} = {' + '.join(terms)};")
        step = self.nest.step(layout)
        base = self._bases[layout]
        return base if step == 0 else f"{base} + i" if step == 1 else f"{base} + i * {step}"


def _element(pointer: str, at: str, half: bool) -> str:
    return f"vload_half({at}, {pointer})" if half else f"{pointer}[{at}]"


def _assignment(pointer: str, at: str, value: str, half: bool) -> str:
    return f"vstore_half({value}, {at}, {pointer});" if half else f"{pointer}[{at}] = {value};"


def type_names(dtype: str, width: int) -> dict[str, str]:
    """Return the C types of `{T}`, the result, and `{M}`, a signed integer of the same width."""
    ctype = C_TYPES[dtype]
    return {"T": vector(ctype, width), "M": vector(MASKS.get(ctype, ctype), width)}


class Nest:
    """A shape with adjacent dimensions merged wherever every layout allows it.

    `inner` is the size of the last dimension, `rows` the product of all other sizes.
    """

    def __init__(
        self, shape: Shape, layouts: Sequence[Layout], borders: Sequence[int] = ()
    ) -> None:
        """Merge dimensions, but never a dimension in `borders` with the dimension before it."""
        self.layouts = list(dict.fromkeys(layouts))
        sizes: list[int] = []
        strides: list[tuple[int, ...]] = []
        barrier = 0
        for d, size in enumerate(shape):
            if d in borders:
                barrier = len(sizes)
            if size == 1:
                continue
            step = tuple(layout.strides[d] for layout in self.layouts)
            merges = len(sizes) > barrier and all(
                outer == inner * size for outer, inner in zip(strides[-1], step, strict=True)
            )
            if merges:
                sizes[-1] *= size
                strides[-1] = step
            else:
                sizes.append(size)
                strides.append(step)
        self.shape = tuple(sizes)
        self.inner = sizes[-1] if sizes else 1
        self.rows = math.prod(sizes[:-1])
        self.strides = (
            dict(zip(self.layouts, zip(*strides, strict=True), strict=True))
            if (strides)
            else dict.fromkeys(self.layouts, ())
        )

    def step(self, layout: Layout) -> int:
        """Return the stride of a layout in the innermost dimension."""
        strides = self.strides[layout]
        return strides[-1] if strides else 0
