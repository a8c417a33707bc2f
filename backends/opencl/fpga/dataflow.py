"""A product as one kernel, or as a dataflow: kernels that run together, joined by channels.

The kernel that stores a product can send its rows to a kernel over rows: softmax, or a norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lower.builder import Builder
from ..lower.epilogue import alone, macros, overwritable
from ..lower.expr import Expr, Rows, Value
from ..lower.launch import Kernel, Launch, Store, Tile, kernel_source
from ..lower.product import Patches, Product
from ..lower.signature import Argument, bind
from ..lower.target import Target

ONE = (1,)
"""The size of a launch with a single work-item."""


@dataclass(frozen=True)
class Dataflow:
    """The kernels of one product; the stores are added later.

    `files` has the operation's sources. `problem` has the arguments that all kernels take, `loads`
    further arguments of the first kernel, and `finishes` further arguments of the storing kernel.
    """

    name: str
    files: Sequence[str]
    loads: Mapping[str, Argument]
    problem: Mapping[str, Argument]
    finishes: Mapping[str, Argument]
    channels: bool

    def with_stores(self, group: Sequence[Store], kept: Sequence[Store]) -> list[Launch]:
        """Return the launches that write the stores `kept` of a group that begins with the product.

        The last stores of the group may be the results of a kernel over rows.
        """
        rows = next((store.expr for store in group if isinstance(store.expr, Rows)), None)
        group = [store for store in group if store.expr is not rows]
        kept = [store for store in kept if store.expr is not rows]
        text, results = macros(group, kept, None if rows is None else rows.source.value)
        further = {} if rows is None else dict(rows.arguments)
        files = ["fpga/dataflow.cl", *self.files]
        options = ARRAY.options
        if rows is not None:
            files[1:1] = [rows.file, "fpga/rows.cl"]
            options = (
                *options,
                "-DROWS",
                *(() if rows.by_channel else (f"-DROW_COLS={ROW_COLS}",)),
            )
        if self.channels:
            options = (*options, "-DCHANNELS")
        elif rows is not None:
            text = text.replace("#define RESULTS ", "#define RESULTS ROW_ARGUMENTS, ")
        source = f"{text}#line 1\n{''.join(map(kernel_source, files))}"
        kernels = self._kernels(results, further)
        inplace, apart = overwritable(group, {**self.loads, **self.finishes, **further})
        return [
            Launch(
                kernel := Kernel(source, name, options), ONE, ONE, bind(kernel, arguments),
                inplace, apart, beside=number % len(kernels),
            )
            for number, (name, arguments) in enumerate(kernels.items(), 1)
        ]  # fmt: skip

    def _kernels(
        self, results: Mapping[str, Argument], further: Mapping[str, Argument]
    ) -> dict[str, Mapping[str, Argument]]:
        """Return each kernel's arguments; a kernel over rows takes `further`."""
        last = {**self.problem, **self.finishes, **results}
        if not self.channels:
            return {self.name: {**self.loads, **last, **further}}
        kernels = {
            f"{self.name}_load": {**self.loads, **self.problem},
            "array": self.problem,
            f"{self.name}_store": last,
        }
        return {**kernels, "normalise": {**self.problem, **further}} if further else kernels


OPERATIONS = {
    "forward": "convolution", "input_gradient": "convolution_input",
    "weight_gradient": "convolution_weight",
}  # fmt: skip
"""Names of the operations of `kernels/fpga/`, by kind of `Patches`."""


def systolic_product(builder: Builder, p: Product) -> Value:
    """Compute C of a product, row-major, of shape (batch, rows, cols)."""
    problem = {"batches": p.batch, "rows": p.rows, "cols": p.cols, "depth": p.depth}
    shape = (p.batch, p.rows, p.cols)
    return launch(builder, "matmul", ["fpga/matmul.cl"], shape, p.operands, problem, p.scaling)


def systolic_patches(builder: Builder, p: Patches) -> Value:
    """Compute a convolution or one of its gradients."""
    name, sizes, (rows, cols, depth) = OPERATIONS[p.kind], p.geometry.arguments, p.size
    return launch(
        builder, name, ("patches.cl", "fpga/places.cl", f"fpga/{name}.cl"), p.shape,
        {**p.operands, **sizes},
        {"batches": p.geometry.groups, "rows": rows, "cols": cols, "depth": depth},
        {**p.shift, **sizes}, by_channel=p.kind != "weight_gradient",
    )  # fmt: skip


def launch(
    builder: Builder, name: str, files: Sequence[str], shape: tuple[int, ...],
    loads: Mapping[str, Argument], problem: Mapping[str, Argument],
    finishes: Mapping[str, Argument], by_channel: bool = False,
) -> Value:  # fmt: skip
    """Launch a product of `kernels/fpga/`, and return its result, of `shape`.

    An epilogue can be added. `by_channel`: the result's rows are channels, and its columns are the
    pixels of all images.
    """
    flow = Dataflow(name, files, loads, problem, finishes, builder.device.channels)
    out = builder.new(shape, "float32")
    row_cols = _row_cols(builder.device)
    launches = alone(flow.with_stores, out)
    builder.product(
        out, Tile(out.shape, out.dtype, launches, flow.with_stores, row_cols, by_channel)
    )
    return out


def _row_cols(target: Target) -> int:
    """Return ROW_COLS if local memory holds the blocks and a strip of rows of this length, else 0.

    With channels the driver's limit does not matter, because an FPGA makes local memory from
    block RAM as kernels need it.
    """
    if target.channels:
        return ROW_COLS
    rows, cols = ARRAY.tile
    nbytes = (ARRAY.block * (rows + cols) + rows * ROW_COLS) * 4
    return ROW_COLS if nbytes <= target.local_memory_nbytes else 0


@dataclass(frozen=True)
class Array:
    """A chain of processing elements and its on-chip buffers, with sizes in floats."""

    rows: int = 8
    """Processing elements; each computes one row of C at a time."""
    cols: int = 16
    """Multiply-adds of a processing element in each cycle."""
    interleave_rows: int = 8
    interleave_cols: int = 8
    """A processing element keeps interleave_rows * interleave_cols vectors of sums, and adds to
    them in turn."""
    block: int = 32
    """Steps of k whose inputs are in block RAM at the same time."""
    capacity: int = 2048
    """Vectors that a channel holds."""
    load_width: int = 16
    """Floats read from memory in each cycle."""

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that the array computes at the same time."""
        return self.rows * self.interleave_rows, self.cols * self.interleave_cols

    @property
    def turns(self) -> int:
        """Cycles per step of k, and between two additions to the same sum."""
        return self.interleave_rows * self.interleave_cols

    @property
    def options(self) -> tuple[str, ...]:
        return (
            f"-DARRAY_ROWS={self.rows}", f"-DARRAY_COLS={self.cols}",
            f"-DINTERLEAVE_ROWS={self.interleave_rows}",
            f"-DINTERLEAVE_COLS={self.interleave_cols}", f"-DBLOCK={self.block}",
            f"-DCAPACITY={self.capacity}", f"-DLOAD_WIDTH={self.load_width}",
        )  # fmt: skip


ARRAY = Array()
"""The array of all kernels in the family `fpga`."""
ROW_COLS = 256
"""The most columns of a row that a kernel over rows keeps on the chip."""

AFFINE = ("row_weight", "row_bias")
RUNNING = ("row_running_mean", "row_running_var", "row_new_mean", "row_new_var")


def softmax(builder: Builder, x: Expr, logarithm: bool) -> Value | None:
    """Return softmax over x's last dimension, or its logarithm. None if x is no product that still
    waits for an epilogue."""
    results = _follow(builder, x, "softmax", (x.shape,), ("y",), {"row_logarithm": int(logarithm)})
    return None if results is None else results[0]


def layer_norm(
    builder: Builder, x: Expr, affine: Sequence[Value | None], eps: float
) -> tuple[Value, ...] | None:
    """Return (y, mean, rstd) of layer norm over x's last dimension.

    Return None if x is no product that waits for an epilogue. `affine` has weight and bias.
    """
    few = (*x.shape[:-1], 1)
    arguments = {**_affine(affine), "row_eps": float(eps)}
    return _follow(builder, x, "layer_norm", (x.shape, few, few), ("y", "mean", "rstd"), arguments)


def batch_norm(
    builder: Builder, x: Expr, affine: Sequence[Value | None], running: Sequence[Value | None],
    momentum: float, eps: float,
) -> tuple[Value, Value, Value, Value | None, Value | None] | None:  # fmt: skip
    """Return (y, mean, rstd, new mean, new variance) of batch norm over x [N][C][...].

    Return None if x is no convolution that waits for an epilogue. Without `running` statistics the
    last two results are None.
    """
    tensors = {name: v for name, v in zip(RUNNING, running, strict=False) if v is not None}
    names = ("y", "mean", "rstd", *(("new_mean", "new_var") if tensors else ()))
    shapes = (x.shape, *[x.shape[1:2]] * (len(names) - 1))
    arguments: dict[str, Argument] = {
        **_affine(affine), **tensors, "row_has_running": int(bool(tensors)),
        "row_channels": x.shape[1], "row_pixels": math.prod(x.shape[2:]),
        "row_momentum": float(momentum), "row_eps": float(eps),
    }  # fmt: skip
    results = _follow(builder, x, "batch_norm", shapes, names, arguments, by_channel=True)
    if results is None:
        return None
    y, mean, rstd, *new = results
    new_mean, new_var = new if new else (None, None)
    return y, mean, rstd, new_mean, new_var


def _affine(values: Sequence[Value | None]) -> dict[str, Argument]:
    """Return the weight and the bias if present, and a flag for each."""
    tensors = {name: v for name, v in zip(AFFINE, values, strict=True) if v is not None}
    return {**tensors, **{f"row_has_{name[4:]}": int(name in tensors) for name in AFFINE}}


def _follow(
    builder: Builder, x: Expr, file: str, shapes: tuple[tuple[int, ...], ...],
    names: tuple[str, ...], arguments: Mapping[str, Argument], by_channel: bool = False,
) -> tuple[Value, ...] | None:  # fmt: skip
    source = builder.pool.load(builder.reshape(builder.store(x), x.shape))
    results = [builder.new(shape, "float32") for shape in shapes]
    given = {f"row_{name}": value for name, value in zip(names, results, strict=True)}
    values = [each for each in arguments.values() if isinstance(each, Value)]
    for name in {"layer_norm": AFFINE, "batch_norm": (*AFFINE, *RUNNING)}.get(file, ()):
        if name not in arguments and name not in given:
            given[name] = results[0]  # any tensor will do: the kernel does not use it
    reads = tuple(builder.pool.load(value) for value in values)
    rows = Rows(
        x.shape, "float32", source, f"fpga/{file}.cl", {**arguments, **given}, reads, by_channel
    )
    return tuple(results) if builder.follow(rows, results) else None
