"""Lowers one graph into launches: the interface that the functions in `ops/` use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import dtype_name

from . import epilogue
from .codegen import generate
from .expr import (
    Apply,
    Const,
    Expr,
    Layout,
    Load,
    Pool,
    Rows,
    Shape,
    Value,
    View,
    walk,
    work,
)
from .launch import Kernel, Launch, Store, Tile
from .signature import Argument, bind
from .target import Target

CHEAP = 2
"""An expression with at most this `work` is cheaper to recompute than to store and load."""
LARGEST = 48
"""Most distinct expressions in a fused tree; a larger tree is stored, to bound compile time."""
NEAR = 6
"""A store may join one of the last NEAR kernels."""
WAITING = 2
"""The most products that wait for an epilogue: the gradients of an input and of a weight."""

Lowered = Expr | tuple["Expr | None", ...]


class Builder:
    """The state of lowering: expressions not yet stored, tensors, and launches in order."""

    def __init__(self, target: Target, outputs: frozenset[fx.Node] = frozenset()) -> None:
        """`define` stores each of `outputs`, if possible in the kernel of its operands."""
        self.device = target
        self._outputs = outputs
        self._steps: list[Launch | list[Store]] = []
        self.pool = Pool()
        self._lowered: dict[fx.Node, Lowered] = {}
        self._stored: dict[Expr, Value] = {}
        self._copied: dict[int, Load] = {}
        self._groups: list[list[Store]] = []
        self._steady: set[int] = set()
        self._count = 0

    # -- for all lowerings

    def value(self, node: fx.Node) -> Value:
        """Return an argument as a row-major tensor; see `store`."""
        return self.store(self.expr(node))

    def strided(self, node: fx.Node) -> tuple[Value, tuple[int, ...], int]:
        """Return (tensor, strides, offset) of an argument, in elements; a view is not copied."""
        expr = self.expr(node)
        if isinstance(expr, Load) and not expr.indices:
            return expr.value, expr.layout.strides, expr.layout.offset
        return self.store(expr), Layout.row_major(expr.shape).strides, 0

    def source_of(self, copy: Value) -> Load | None:
        """Return the strided source of `copy`, or None. `finish` drops a copy that nobody reads."""
        return self._copied.get(copy.id)

    def new(self, shape: Sequence[int], dtype: str) -> Value:
        """Return a new tensor, whose memory lives from its first launch to its last."""
        self._count += 1
        return Value(self._count, tuple(shape), dtype)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """Return the same memory with another shape. Raises `BackendError` if the sizes differ."""
        if math.prod(shape) != math.prod(value.shape):
            raise BackendError(f"cannot reshape {value.shape} to {tuple(shape)}: sizes differ")
        return Value(value.id, tuple(shape), value.dtype)

    def launch(
        self,
        kernel: Kernel,
        global_size: Sequence[int],
        args: Mapping[str, Argument],
        local_size: Sequence[int] | None = (),
        steady: bool = False,
        inplace: Iterable[Value] = (),
    ) -> None:
        """Append a launch of `kernel`, which gets ints as int32 and floats as float32.

        `args` maps the parameter names of the source to arguments; see `signature.bind`. By default
        every work-item is a group; with None as the local size, the runtime chooses the groups.
        `steady`: the kernel reads only `steady` tensors, and no other launch writes its results.
        A result may take the memory of one of `inplace`; see `Launch`.
        """
        size = tuple(global_size)
        local = None if local_size is None else tuple(local_size) or (1,) * len(size)
        ids = frozenset(value.id for value in inplace)
        self.add(Launch(kernel, size, local, bind(kernel, args), ids, steady=steady))

    def add(self, launch: Launch) -> None:
        """Append a launch after the launches that it depends on."""
        self._flush(launch.touches)
        if math.prod(launch.global_size) > 0:
            self._steps.append(launch)

    def product(self, out: Value, tile: Tile) -> None:
        """Add a product: the launches of `tile` compute the matrices `out`.

        The launches wait for an epilogue until another kernel needs the product, or until more
        than WAITING products wait.
        """
        self._groups.append([Store(tile, out, Layout.row_major(out.shape))])
        if len(waiting := list(filter(epilogue.is_product, self._groups))) > WAITING:
            self._flush({waiting[0][0].out.id})

    def follow(self, rows: Rows, results: Sequence[Value]) -> bool:
        """Fuse a kernel over rows with the product that it reads; return whether that succeeded."""
        stores = [Store(rows, value, Layout.row_major(value.shape)) for value in results]
        return epilogue.follow(self._groups, stores)

    def steady(self, value: Value) -> bool:
        """Return whether many runs in a row get the same tensor, such as a weight."""
        return value.id in self._steady

    def result(self, node: fx.Node, value: Value | tuple[Value | None, ...]) -> None:
        """Set the result of `node`; a tuple for an operator with several results."""
        if isinstance(value, tuple):
            loaded = (None if item is None else self.pool.load(item) for item in value)
            self._lowered[node] = tuple(loaded)
        else:
            self._lowered[node] = self.pool.load(value)

    # -- for elementwise, view and reduction lowerings

    def expr(self, arg: object, shape: Shape | None = None, dtype: str = "float32") -> Expr:
        """Return a node's expression, or a constant for a number; expanded to `shape`, if given."""
        if isinstance(arg, fx.Node):
            lowered = self._lowered[arg]
            if isinstance(lowered, tuple):
                raise BackendError(f"{arg.name} is a tuple of results, not a tensor")
            if lowered in self._stored:
                lowered = self.pool.load(self._stored[lowered])
            return lowered if shape is None else self.expand(lowered, shape)
        if not isinstance(arg, (bool, int, float)):
            raise BackendError(f"expected a tensor or a number, got {arg!r}")
        return self.pool.make(Const, shape or (), dtype, arg)

    def results(self, node: fx.Node) -> tuple[Expr | None, ...]:
        """Return the results of a node as a tuple, even if there is only one."""
        lowered = self._lowered[node]
        return lowered if isinstance(lowered, tuple) else (lowered,)

    def apply(self, code: str, dtype: str, *args: Expr, weight: int = 1, alone: str = "") -> Expr:
        """Return the C expression `code` of arguments that have the same shape; see `Apply`."""
        args = tuple(map(self._bounded, args))
        return self.pool.make(Apply, args[0].shape, dtype, code, args, weight, alone)

    def expand(self, expr: Expr, shape: Shape) -> Expr:
        """Return `expr` broadcast to `shape`; store `expr` first if recomputing it is costly."""
        if expr.shape == shape:
            return expr
        if math.prod(shape) > expr.numel and work(expr) > CHEAP:
            expr = self.pool.load(self.store(expr))
        return self.view(expr, lambda layout: _broadcast(layout, shape))

    def view(self, expr: Expr, view: View) -> Expr:
        """Return `expr` seen through `view`; store `expr` first if no strides express the view."""
        seen = self.pool.view(expr, view)
        if seen is None:
            seen = self.pool.view(self.pool.load(self.store(expr)), view)
        assert seen is not None, "a row-major tensor has every view that torch allows"
        return seen

    def define(self, node: fx.Node, expr: Expr) -> None:
        """Set `node` to `expr`; store an output, and a costly expression with several users."""
        if node in self._outputs or (len(node.users) > 1 and work(expr) > CHEAP):
            expr = self.pool.load(self.store(expr))
        self._lowered[node] = expr

    def define_results(self, node: fx.Node, exprs: tuple[Expr | None, ...]) -> None:
        """Set the results of a node that has several."""
        self._lowered[node] = exprs

    def store(self, expr: Expr) -> Value:
        """Return `expr` as a row-major tensor in memory."""
        if isinstance(expr, Load) and expr.plain:
            return self.reshape(expr.value, expr.shape)
        if expr not in self._stored:
            out = self.new(expr.shape, expr.dtype)
            self.store_into(expr, out, Layout.row_major(expr.shape))
            self._stored[expr] = out
            if isinstance(expr, Load) and not expr.indices:
                self._copied[out.id] = expr
        return self._stored[expr]

    def store_copy(self, expr: Expr) -> Value:
        """Return `expr` in a new tensor, even if it is stored already."""
        out = self.new(expr.shape, expr.dtype)
        self.store_into(expr, out, Layout.row_major(expr.shape))
        return out

    def store_into(self, expr: Expr, out: Value, layout: Layout) -> None:
        """Write `expr` to the elements of `out` that `layout` names."""
        if expr.numel == 0:
            return
        store = Store(expr, out, layout)
        for at in reversed(range(max(0, len(self._groups) - NEAR), len(self._groups))):
            group, later = self._groups[at], self._groups[at + 1 :]
            if any(other.follows(group) for others in later for other in others):
                continue
            if epilogue.is_product(group):
                joining = epilogue.fitted(self.pool, store, group)
            else:
                joining = store if store.joins(group) else None
            if joining is not None:
                # No later group needs this group: it can run last, after the operands of the store.
                del self._groups[at]
                self._groups.append([*group, joining])
                return
        self._groups.append([store])

    # -- for the compiler

    def input(self, node: fx.Node) -> Value:
        """Return the tensor of a placeholder."""
        value = self.new(node_shape(node), node_dtype(node))
        if node.meta.get("steady"):
            self._steady.add(value.id)
        self.result(node, value)
        return value

    def finish(self, results: Iterable[Value]) -> tuple[Launch, ...]:
        """Return all launches in order, without stores that no kernel and no result needs."""
        self._steps += self._groups
        self._groups = []
        needed = {value.id for value in results}
        launches: list[Launch] = []
        for step in reversed(self._steps):
            if isinstance(step, Launch):
                needed |= step.touches
                launches.append(step)
            elif kept := [store for store in step if store.out.id in needed]:
                needed.update(*(store.reads for store in step))
                if epilogue.is_product(step):
                    launches += reversed(epilogue.launches(step, kept, self.device))
                else:
                    launches.append(generate(step, self.device, kept))
        return tuple(reversed(launches))

    def _bounded(self, expr: Expr) -> Expr:
        if isinstance(expr, Apply) and sum(1 for _ in walk(expr)) > LARGEST:
            return self.pool.load(self.store(expr))
        return expr

    def _flush(self, needed: set[int]) -> None:
        """Emit the groups, but a product only if an emitted group reads it or `needed` names it.

        `needed` has the ids of the next launch's tensors, or the id of a product to emit.
        """
        needed = set(needed)
        waiting, ready = [], []
        for group in reversed(self._groups):
            if epilogue.is_product(group) and not any(store.out.id in needed for store in group):
                waiting.append(group)
            else:
                ready.append(group)
                needed.update(*(store.reads for store in group))
        self._groups = waiting[::-1]
        self._steps += ready[::-1]


def node_dtype(node: fx.Node) -> str:
    """Return the dtype of a node with one result."""
    return dtype_name(node.meta["val"].dtype)


def node_shape(node: fx.Node) -> Shape:
    """Return the shape of a node with one result."""
    return tuple(map(int, node.meta["val"].shape))


def _broadcast(layout: Layout, shape: Shape) -> Layout | None:
    missing = len(shape) - len(layout.shape)
    strides = [0] * missing
    for have, want, stride in zip(layout.shape, shape[missing:], layout.strides, strict=True):
        strides.append(0 if have == 1 and want != 1 else stride)
    return Layout(shape, tuple(strides), layout.offset)
