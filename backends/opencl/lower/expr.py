"""Lazy elementwise expressions: the value of a fused kernel at one coordinate of its output.

An expression has a logical shape. Its leaves are affine in the coordinates: a load of a tensor
through strides, a constant, or the coordinates themselves. So a view (permute, slice, expand, ...)
of an expression is the same expression with other strides at the leaves, and costs nothing.

`Pool` interns expressions: equal expressions are one object, so common parts are found by identity
and computed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Shape = tuple[int, ...]
DEAR = 8
"""Least weight of a function that takes many instructions."""


@dataclass(frozen=True)
class Value:
    """A row-major tensor in global memory. `id` names the memory."""

    id: int
    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The place of each element of a tensor of `shape`: `offset + sum(coordinate * stride)`.

    Offset and strides count elements. The stride of a dimension of size 1 is 0, so that equal
    layouts compare equal. Views follow torch's rules, and copy no memory.
    """

    shape: Shape
    strides: tuple[int, ...]
    offset: int = 0

    def __post_init__(self) -> None:
        strides = (0 if n == 1 else s for n, s in zip(self.shape, self.strides, strict=True))
        object.__setattr__(self, "strides", tuple(strides))

    @staticmethod
    def row_major(shape: Shape) -> Layout:
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return Layout(shape, tuple(reversed(strides)))

    def permute(self, order: Sequence[int]) -> Layout:
        """Return the layout whose dimension `i` is dimension `order[i]` of this one."""
        shape = tuple(self.shape[d] for d in order)
        return Layout(shape, tuple(self.strides[d] for d in order), self.offset)

    def order(self) -> list[int]:
        """Return the dimensions by decreasing stride: `permute` by them undoes a permutation."""
        strides = list(self.strides)
        for d in reversed(range(len(strides) - 1)):
            if self.shape[d] == 1:  # no stride tells its place, so keep it
                strides[d] = strides[d + 1]
        return sorted(range(len(strides)), key=lambda d: -strides[d])

    def narrow(self, dim: int, start: int, length: int, step: int = 1) -> Layout:
        """Return `length` elements of `dim` from `start` on, every `step`th; -1 walks backwards."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[dim]
        shape[dim], strides[dim] = length, strides[dim] * step
        return Layout(tuple(shape), tuple(strides), offset)

    def select(self, dim: int, index: int) -> Layout:
        """Return the layout at one index of a dimension, without that dimension."""
        kept = [d for d in range(len(self.shape)) if d != dim]
        return self.narrow(dim, index, 1).permute(kept)

    def unsqueeze(self, dim: int) -> Layout:
        """Insert a dimension of size 1 before `dim`."""
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return Layout(shape, (*self.strides[:dim], 0, *self.strides[dim:]), self.offset)

    def reshape(self, shape: Shape) -> Layout | None:
        """Return a layout of `shape` for these elements; None if no strides express their order."""
        if math.prod(shape) == 0:
            return Layout(shape, (0,) * len(shape), self.offset)
        strides = [0] * len(shape)
        d = len(shape) - 1
        for run_size, run_stride in reversed(self.runs()):
            size, stride = run_size, run_stride
            while size > 1:
                while shape[d] == 1:
                    d -= 1
                if size % shape[d]:
                    return None
                strides[d] = stride
                stride *= shape[d]
                size //= shape[d]
                d -= 1
        return Layout(shape, tuple(strides), self.offset)

    def runs(self) -> list[tuple[int, int]]:
        """Merge dimensions where strides allow it; return (size, innermost stride) of each."""
        runs: list[tuple[int, int]] = []
        for size, stride in zip(self.shape, self.strides, strict=True):
            if size == 1:
                continue
            if runs and runs[-1][1] == size * stride:
                runs[-1] = (runs[-1][0] * size, stride)
            else:
                runs.append((size, stride))
        return runs


View = Callable[[Layout], "Layout | None"]
"""A change of layout; None if no strides express it."""


@dataclass(frozen=True, eq=False)
class Expr:
    """An elementwise expression with a shape and a dtype."""

    shape: Shape
    dtype: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """The same number everywhere."""

    number: float | int | bool


@dataclass(frozen=True, eq=False)
class Coord(Expr):
    """The integer that `layout` assigns to the coordinates."""

    layout: Layout


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """An element of a tensor. Each of `indices`, (expression, stride, size), adds to the offset."""

    value: Value
    layout: Layout
    indices: tuple[tuple[Expr, int, int], ...] = ()

    @property
    def plain(self) -> bool:
        """Whether the load reads each element of the tensor once, in row-major order."""
        return (
            not self.indices
            and self.layout == Layout.row_major(self.shape)
            and self.numel == math.prod(self.value.shape)
        )


@dataclass(frozen=True, eq=False)
class Apply(Expr):
    """A C expression of arguments; `{0}` is the first. All arguments have the same shape."""

    code: str
    args: tuple[Expr, ...]
    weight: int = 1
    """Rough cost, in additions."""
    alone: str = ""
    """A C expression for the same value that does not need the last argument, or "".

    A kernel that uses the argument nowhere else then need not load it.
    """


@dataclass(frozen=True, eq=False)
class Rows(Expr):
    """A result of a kernel that reads whole rows of a product. `source` loads the product.

    `file` has the kernel's source, `arguments` maps the kernel's parameters to arguments, and
    `reads` loads the tensors among them that the kernel reads.
    """

    source: Load
    file: str
    arguments: Mapping[str, Value | int | float]
    reads: tuple[Load, ...] = ()
    by_channel: bool = False
    """Whether a row is a channel of [N][C][...]; otherwise it is the last dimension."""


E = TypeVar("E", bound=Expr)


class Pool:
    """Makes expressions; equal expressions are the same object."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Any, ...], Expr] = {}

    def make(self, kind: type[E], *fields: Any) -> E:
        """Return `kind(*fields)`, or the equal expression that exists already."""
        # 1, 1.0 and True are equal in Python and different in C.
        key = (kind, fields, *map(type, fields))
        expr = self._interned.setdefault(key, kind(*fields))
        assert isinstance(expr, kind)
        return expr

    def load(self, value: Value) -> Load:
        """Return a plain load of a tensor."""
        return self.make(Load, value.shape, value.dtype, value, Layout.row_major(value.shape))

    def view(self, expr: Expr, view: View) -> Expr | None:
        """Return `expr` seen through `view`, or None if a leaf's strides cannot express it."""
        return self._rewrite(expr, view, {})

    def _rewrite(self, expr: Expr, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        if expr not in memo:
            memo[expr] = self._rewrite_one(expr, view, memo)
        return memo[expr]

    def _rewrite_one(self, expr: Expr, view: View, memo: dict[Expr, Expr | None]) -> Expr | None:
        if isinstance(expr, Apply):
            args = [self._rewrite(arg, view, memo) for arg in expr.args]
            done = [arg for arg in args if arg is not None]
            if len(done) < len(args):
                return None
            fields = expr.dtype, expr.code, tuple(done), expr.weight, expr.alone
            return self.make(Apply, done[0].shape, *fields)
        flat = Layout(expr.shape, (0,) * len(expr.shape))
        layout = view(expr.layout if isinstance(expr, (Load, Coord)) else flat)
        if layout is None:
            return None
        if isinstance(expr, Load):
            moved = []
            for index, stride, size in expr.indices:
                seen = self._rewrite(index, view, memo)
                if seen is None:
                    return None
                moved.append((seen, stride, size))
            return self.make(Load, layout.shape, expr.dtype, expr.value, layout, tuple(moved))
        if isinstance(expr, Coord):
            return self.make(Coord, layout.shape, expr.dtype, layout)
        assert isinstance(expr, Const)
        return self.make(Const, layout.shape, expr.dtype, expr.number)


def walk(*roots: Expr) -> Iterator[Expr]:
    """Yield every distinct expression under `roots`, arguments before their users."""
    seen: set[Expr] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        expr, ready = stack.pop()
        if ready:
            yield expr
        elif expr not in seen:
            seen.add(expr)
            stack.append((expr, True))
            stack += [(child, False) for child in reversed(children(expr))]


def children(expr: Expr) -> tuple[Expr, ...]:
    if isinstance(expr, Apply):
        return expr.args
    if isinstance(expr, Load):
        return tuple(index for index, _, _ in expr.indices)
    if isinstance(expr, Rows):
        return (expr.source, *expr.reads)
    return ()


def loads(expr: Expr) -> list[Load]:
    return [item for item in walk(expr) if isinstance(item, Load)]


def layouts_of(*roots: Expr) -> list[Layout]:
    """Return the layouts of all distinct loads and coordinates under `roots`."""
    return [item.layout for item in walk(*roots) if isinstance(item, (Load, Coord))]


def work(expr: Expr) -> int:
    """Return the rough cost of one element, in additions. Only work on loaded elements counts."""
    total = 0
    fed: dict[Expr, bool] = {}
    for item in walk(expr):
        fed[item] = isinstance(item, Load) or any(fed[child] for child in children(item))
        if isinstance(item, Apply) and fed[item]:
            total += item.weight
    return total
