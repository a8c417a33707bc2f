"""Lowers one graph into launches: what the functions in `ops/` are written against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from torch import fx

from hetpipe.errors import BackendError
from hetpipe.sdk.graph import dtype_name

from .codegen import Store, generate
from .expr import Apply, Const, Expr, Layout, Load, Pool, Shape, Value, View, loads, walk, work
from .target import Target

__all__ = ["Builder", "Kernel", "Launch", "Value"]

CHEAP = 2
"""Work (see `expr.work`) up to which computing again beats a trip through memory."""
LARGEST = 48
"""Distinct expressions in one fused tree, beyond which it is stored: bounds compile time."""
NEAR = 6
"""How many kernels back a store looks for one to join."""


@dataclass(frozen=True)
class Kernel:
    """A kernel function of an OpenCL source, specialised by `-D` options."""

    source: str
    name: str
    options: tuple[str, ...] = ()
    generated: bool = False
    """Whether the name is unique to the text, so that many may share a program."""


@dataclass(frozen=True)
class Launch:
    """One kernel over one range."""

    kernel: Kernel
    global_size: tuple[int, ...]
    local_size: tuple[int, ...] | None
    args: tuple[Value | int | float, ...]
    inplace: frozenset[int] = field(default_factory=frozenset)
    """Tensors read element by element, each just before the same element of a result is written:
    a result of the same size may take their memory."""
    steady: bool = False
    """Whether it reads weights alone: once is enough, until other weights come."""


Lowered = Expr | tuple["Expr | None", ...]


class Builder:
    """The state of lowering: expressions that wait, tensors, and launches in order."""

    def __init__(self, target: Target, outputs: frozenset[fx.Node] = frozenset()) -> None:
        """`outputs`: nodes to store as soon as they are known, beside what they share."""
        self.device = target
        self._outputs = outputs
        self.launches: list[Launch] = []
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
        args: Sequence[Value | int | float],
        steady: bool = False,
    ) -> None:
        """Run `kernel`. An int argument is an int32 there, a float a float32.

        `steady`: it reads no tensor but some that are `steady`, and writes tensors that no other
        launch writes.
        """
        self._flush()
        if math.prod(global_size) > 0:
            local = None if local_size is None else tuple(local_size)
            launch = Launch(kernel, tuple(global_size), local, tuple(args), steady=steady)
            self.launches.append(launch)

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
            if store.joins(group):
                # Nothing since needs the group: it may as well run last, after what this reads.
                del self._groups[at]
                self._groups.append([*group, store])
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

    def finish(self) -> None:
        """Run all that still waits."""
        self._flush()

    def _bounded(self, expr: Expr) -> Expr:
        if isinstance(expr, Apply) and sum(1 for _ in walk(expr)) > LARGEST:
            return self.pool.load(self.store(expr))
        return expr

    def _flush(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            self._launch_group(group)

    def _launch_group(self, group: list[Store]) -> None:
        code = generate(group, self.device)
        kernel = Kernel(code.text, code.name, generated=True)
        read = [load for store in group for load in loads(store.expr)]
        straight = {load.value.id for load in read if load.plain}
        if not all(store.plain for store in group):
            straight = set()
        inplace = frozenset(straight - {load.value.id for load in read if not load.plain})
        self.launches.append(Launch(kernel, code.global_size, code.local_size, code.args, inplace))


@cache
def kernel_source(path: str) -> str:
    """Text of a file of `hetpipe.kernels`. Raises `BackendError` if there is none."""
    try:
        return files("hetpipe.kernels").joinpath(path).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise BackendError(f"there is no kernel source {path!r} in hetpipe.kernels") from error


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
