"""Lowers one graph into launches: what the functions in `ops/` are written against."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import dtype_name

from . import epilogue
from .codegen import Kernel, Launch, Store, Tile, generate, kernel_source
from .expr import Apply, Const, Expr, Layout, Load, Pool, Shape, Value, View, loads, walk, work
from .signature import Argument, bind
from .target import Target

__all__ = ["Builder", "Kernel", "Launch", "Value", "kernel_source"]

CHEAP = 2
"""Work (see `expr.work`) up to which computing again beats a trip through memory."""
LARGEST = 48
"""Distinct expressions in one fused tree, beyond which it is stored: bounds compile time."""
NEAR = 6
"""How many kernels back a store looks for one to join."""
WAITING = 2
"""Products that wait for an epilogue at once: a gradient to pass on, and that of a weight."""


Lowered = Expr | tuple["Expr | None", ...]


class Builder:
    """The state of lowering: expressions that wait, tensors, and launches in order."""

    def __init__(self, target: Target, outputs: frozenset[fx.Node] = frozenset()) -> None:
        """`outputs`: nodes to store as soon as they are known, beside what they share."""
        self.device = target
        self._outputs = outputs
        self._steps: list[Launch | list[Store]] = []
        self.pool = Pool()
        self._lowered: dict[fx.Node, Lowered] = {}
        self._stored: dict[Expr, Value] = {}
        self._groups: list[list[Store]] = []
        self._steady: set[int] = set()
        self._count = 0

    # -- what lowerings use

    def value(self, node: fx.Node) -> Value:
        """The tensor of an argument, row-major; runs what waits for it."""
        return self.store(self.expr(node))

    def strided(self, node: fx.Node) -> tuple[Value, tuple[int, ...], int]:
        """(tensor, strides, offset), in elements, of an argument: no copy if it is a view."""
        expr = self.expr(node)
        if isinstance(expr, Load) and not expr.indices:
            return expr.value, expr.layout.strides, expr.layout.offset
        return self.store(expr), Layout.row_major(expr.shape).strides, 0

    def new(self, shape: Sequence[int], dtype: str) -> Value:
        """A fresh tensor, whose memory lives from its first launch to its last."""
        self._count += 1
        return Value(self._count, tuple(shape), dtype)

    def reshape(self, value: Value, shape: Sequence[int]) -> Value:
        """The same memory with another shape. Raises `BackendError` if the sizes differ."""
        if math.prod(shape) != math.prod(value.shape):
            raise BackendError(f"cannot reshape {value.shape} to {tuple(shape)}: sizes differ")
        return Value(value.id, tuple(shape), value.dtype)

    def launch(
        self,
        kernel: Kernel,
        global_size: Sequence[int],
        local_size: Sequence[int] | None,
        args: Mapping[str, Argument],
        steady: bool = False,
    ) -> None:
        """Run `kernel`. An int argument is an int32 there, a float a float32.

        `args` are by the names that the source declares; see `signature.bind`.
        `steady`: it reads no tensor but some that are `steady`, and writes tensors that no other
        launch writes.
        """
        local = None if local_size is None else tuple(local_size)
        self.add(Launch(kernel, tuple(global_size), local, bind(kernel, args), steady=steady))

    def add(self, launch: Launch) -> None:
        """Run a launch behind all that it waits for."""
        self._flush(launch.touches)
        if math.prod(launch.global_size) > 0:
            self._steps.append(launch)

    def product(self, out: Value, launches: Sequence[Launch]) -> None:
        """`launches` make the matrices `out`; the last may take an epilogue, so they wait for one.

        They run in one go when something other than an epilogue needs them.
        """
        tile = Tile(out.shape, out.dtype, tuple(launches))
        self._groups.append([Store(tile, out, Layout.row_major(out.shape))])
        waiting = [group for group in self._groups if epilogue.is_product(group)]
        if len(waiting) > WAITING:
            self._flush({waiting[0][0].out.id})

    def steady(self, value: Value) -> bool:
        """Whether runs will be given the same tensor many times over: a weight."""
        return value.id in self._steady

    def result(self, node: fx.Node, value: Value | tuple[Value | None, ...]) -> None:
        """Say what `node` is; a tuple for an operator with several results."""
        if isinstance(value, tuple):
            self._lowered[node] = tuple(
                None if item is None else self.pool.load(item) for item in value
            )
        else:
            self._lowered[node] = self.pool.load(value)

    def source(self, path: str) -> str:
        """Text of a kernel file, such as `cpu/matmul.cl`."""
        return kernel_source(path)

    # -- what elementwise, view and reduction lowerings use besides

    def expr(self, arg: object, shape: Shape | None = None, dtype: str = "float32") -> Expr:
        """An argument as an expression: a node's own, or a number as a constant of `shape`."""
        if isinstance(arg, fx.Node):
            found = self._lowered[arg]
            if isinstance(found, tuple):
                raise BackendError(f"{arg.name} is a tuple of results, not a tensor")
            if found in self._stored:
                found = self.pool.load(self._stored[found])
            return found if shape is None else self.expand(found, shape)
        if not isinstance(arg, (bool, int, float)):
            raise BackendError(f"expected a tensor or a number, got {arg!r}")
        return self.pool.make(Const, shape or (), dtype, arg)

    def results(self, node: fx.Node) -> tuple[Expr | None, ...]:
        """The results of a node that has several."""
        found = self._lowered[node]
        return found if isinstance(found, tuple) else (found,)

    def apply(self, code: str, dtype: str, *args: Expr, weight: int = 1) -> Expr:
        """The C expression `code` of the arguments, which have one shape."""
        args = tuple(self._bounded(arg) for arg in args)
        return self.pool.make(Apply, args[0].shape, dtype, code, args, weight)

    def expand(self, expr: Expr, shape: Shape) -> Expr:
        """`expr` broadcast to `shape`; stored first if computing it repeatedly is dear."""
        if expr.shape == shape:
            return expr
        if math.prod(shape) > expr.numel and work(expr) > CHEAP:
            expr = self.pool.load(self.store(expr))
        return self.view(expr, lambda layout: _broadcast(layout, shape))

    def view(self, expr: Expr, view: View) -> Expr:
        """`expr` seen through `view`, stored first if its strides cannot express that."""
        seen = self.pool.view(expr, view)
        if seen is None:
            seen = self.pool.view(self.pool.load(self.store(expr)), view)
        assert seen is not None, "a row-major tensor has every view that torch allows"
        return seen

    def define(self, node: fx.Node, expr: Expr) -> None:
        """Say that `node` is `expr`, computed when and where it is needed."""
        if node in self._outputs or (len(node.users) > 1 and work(expr) > CHEAP):
            expr = self.pool.load(self.store(expr))
        self._lowered[node] = expr

    def define_results(self, node: fx.Node, exprs: tuple[Expr | None, ...]) -> None:
        """The same for a node with several results."""
        self._lowered[node] = exprs

    def store(self, expr: Expr) -> Value:
        """`expr` as a row-major tensor in memory."""
        if isinstance(expr, Load) and expr.plain:
            return self.reshape(expr.value, expr.shape)
        if expr not in self._stored:
            out = self.new(expr.shape, expr.dtype)
            self.store_into(expr, out, Layout.row_major(expr.shape))
            self._stored[expr] = out
        return self._stored[expr]

    def store_copy(self, expr: Expr) -> Value:
        """`expr` in a tensor that nothing else shares."""
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
            joining = self._joining(store, group)
            if joining is not None:
                # Nothing since needs the group: it may as well run last, after what this reads.
                del self._groups[at]
                self._groups.append([*group, joining])
                return
        self._groups.append([store])

    # -- what the compiler uses

    def input(self, node: fx.Node) -> Value:
        """The tensor that a placeholder stands for."""
        value = self.new(node_shape(node), node_dtype(node))
        if node.meta.get("steady"):
            self._steady.add(value.id)
        self.result(node, value)
        return value

    def finish(self, results: Iterable[Value]) -> tuple[Launch, ...]:
        """All launches in order, without stores that no other kernel and no result needs."""
        self._steps += self._groups
        self._groups = []
        needed = {value.id for value in results}
        found: list[Launch] = []
        for step in reversed(self._steps):
            if isinstance(step, Launch):
                needed |= step.touches
                found.append(step)
            elif wanted := [store for store in step if store.out.id in needed]:
                needed.update(*(store.reads for store in step))
                found += reversed(self._launches(step, wanted))
        return tuple(reversed(found))

    def _bounded(self, expr: Expr) -> Expr:
        if isinstance(expr, Apply) and sum(1 for _ in walk(expr)) > LARGEST:
            return self.pool.load(self.store(expr))
        return expr

    def _joining(self, store: Store, group: Sequence[Store]) -> Store | None:
        if epilogue.is_product(group):
            return epilogue.fitted(self.pool, store, group)
        return store if store.joins(group) else None

    def _flush(self, needed: set[int]) -> None:
        """Have run all that waits, but products that neither that nor `needed` depends on."""
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

    def _launches(self, group: Sequence[Store], wanted: Sequence[Store]) -> list[Launch]:
        if epilogue.is_product(group):
            return epilogue.launches(group, wanted, self.device)
        code = generate(group, self.device, wanted)
        kernel = Kernel(code.text, code.name, generated=True)
        read = [load for store in group for load in loads(store.expr)]
        straight = {load.value.id for load in read if load.plain}
        if not all(store.plain for store in group):
            straight = set()
        inplace = frozenset(straight - {load.value.id for load in read if not load.plain})
        return [Launch(kernel, code.global_size, code.local_size, code.args, inplace)]


def node_dtype(node: fx.Node) -> str:
    """The dtype of a node that has one result."""
    return dtype_name(node.meta["val"].dtype)


def node_shape(node: fx.Node) -> Shape:
    """The shape of a node that has one result."""
    return tuple(int(size) for size in node.meta["val"].shape)


def _broadcast(layout: Layout, shape: Shape) -> Layout | None:
    missing = len(shape) - len(layout.shape)
    strides = [0] * missing
    for have, want, stride in zip(layout.shape, shape[missing:], layout.strides, strict=True):
        strides.append(0 if have == 1 and want != 1 else stride)
    return Layout(shape, tuple(strides), layout.offset)
