"""A product as a dataflow of kernels that run at once, joined by channels; or as one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..lower.builder import Builder
from ..lower.expr import Rows, Value
from ..lower.launch import Kernel, Launch, Store, Tile
from ..lower.signature import Argument, bind
from ..lower.sources import kernel_source
from ..lower.store_macros import macros, overwritable, result_alone
from ..lower.target import Target
from .array import ARRAY, ROW_COLS

ONE = (1,)
"""A single work-item."""


@dataclass(frozen=True)
class Dataflow:
    """The kernels of one product; the stores are added later.

    `files` has the operation's sources. `loads` has the arguments of the first kernel, `finishes`
    the arguments of the storing kernel, and `problem` the arguments of all kernels.
    """

    name: str
    files: Sequence[str]
    loads: Mapping[str, Argument]
    problem: Mapping[str, Argument]
    finishes: Mapping[str, Argument]
    channels: bool

    def plain(self, out: Value) -> list[Launch]:
        """Return the launches that write only the product."""
        store = result_alone(out)
        return self.with_stores([store], [store])

    def with_stores(self, group: Sequence[Store], kept: Sequence[Store]) -> list[Launch]:
        """Return the launches that write `kept`, stores of a group that begins with the product.

        The last stores may be results of a kernel over whole rows.
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
        """Return the arguments of each kernel, by name; `further` is for a kernel over rows."""
        last = {**self.problem, **self.finishes, **results}
        if not self.channels:
            return {self.name: {**self.loads, **last, **further}}
        kernels = {
            f"{self.name}_load": {**self.loads, **self.problem},
            "array": self.problem,
            f"{self.name}_store": last,
        }
        return {**kernels, "normalise": {**self.problem, **further}} if further else kernels


def launch(
    builder: Builder, name: str, files: Sequence[str], shape: tuple[int, ...],
    loads: Mapping[str, Argument], problem: Mapping[str, Argument],
    finishes: Mapping[str, Argument], by_channel: bool = False,
) -> Value:  # fmt: skip
    """Launch a product of `kernels/fpga/`, and return its result, of `shape`.

    The result can take an epilogue. `by_channel`: its rows are channels, and its columns are the
    pixels of all images.
    """
    flow = Dataflow(name, files, loads, problem, finishes, builder.device.channels)
    out = builder.new(shape, "float32")
    row_cols = _row_cols(builder.device)
    launches = tuple(flow.plain(out))
    builder.product(
        out, Tile(out.shape, out.dtype, launches, flow.with_stores, row_cols, by_channel)
    )
    return out


def _row_cols(target: Target) -> int:
    """Return the longest row that fits into on-chip memory in addition to the blocks.

    With channels the driver's limit does not matter, because an FPGA makes local memory from
    block RAM as kernels need it.
    """
    if target.channels:
        return ROW_COLS
    rows, cols = ARRAY.tile
    nbytes = (ARRAY.block * (rows + cols) + rows * ROW_COLS) * 4
    return ROW_COLS if nbytes <= target.local_memory_nbytes else 0
