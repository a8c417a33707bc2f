"""User kernels: OpenCL C sources for operators, in a subclass of `OpenCLBackend`.

class Mine(OpenCLBackend):
    name = "mine"

Mine.register_kernel("aten.relu.default", SOURCE, "my_relu", arguments=..., global_size=...)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from hetpipe.errors import BackendError, UnsupportedOperatorError
from hetpipe.records import read_text
from hetpipe.sdk.graph import dtype_name, operator_name

from .. import ops  # noqa: F401 - registers the lowerings
from ..lower.builder import Builder
from ..lower.epilogue import STORES_NOTHING, OwnLaunch, alone
from ..lower.expr import Value
from ..lower.launch import Kernel, Tile
from ..lower.registry import LOWERINGS, Lowering
from ..lower.signature import Argument


@dataclass(frozen=True)
class Call:
    """A call of an operator: its row-major tensors, and all its arguments from the graph.

    A kernel can take the tensors in `inputs`, `outputs` and `packed`; each has a `shape` and a
    `dtype`. `packed` has the results of the kernel's `packs`, by name. `args` and `kwargs` have
    numbers, lists and nodes.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    packed: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class Pack:
    """Another layout of input number `input`, made by the kernel `function` of the same source.

    `OwnKernel.arguments` finds the result, of `shape` and `dtype`, as `call.packed[NAME]`. Weights
    are packed once per update, not once per micro-batch.
    """

    input: int
    function: str
    shape: Callable[[Call], Sequence[int]]
    arguments: Callable[[Call], Mapping[str, Argument]]
    global_size: Callable[[Call], Sequence[int]]
    local_size: Callable[[Call], Sequence[int]] | None = None
    dtype: str = "float32"


@dataclass(frozen=True)
class OwnKernel:
    """The kernel `function` of an OpenCL source, for one operator.

    `arguments` returns all parameters that the source declares, by name: tensors of the call, ints
    (`int` in the source) and floats. `global_size` and `local_size` return the range; without
    `local_size` the runtime chooses one. `applies` returns the reason to run the stock kernel for a
    call, or None. With `kept`, the operator is not decomposed for this backend.
    """

    operator: str
    source: str
    function: str
    arguments: Callable[[Call], Mapping[str, Argument]]
    global_size: Callable[[Call], Sequence[int]]
    local_size: Callable[[Call], Sequence[int]] | None = None
    applies: Callable[[Call], str | None] = lambda call: None
    packs: Mapping[str, Pack] = field(default_factory=dict)
    """Other layouts of inputs, by name."""
    epilogue: bool = False
    """Whether the kernel can compute the pointwise operators that follow it. Its source must end
    its parameters with `RESULTS`, and write each element of its only result exactly once, by
    `STORE(element, value)`."""
    options: tuple[str, ...] = ()
    kept: bool = True


def text_of(source: str | Path) -> str:
    """Return a source, or the text of a file. Raises `BackendError` if it cannot be read."""
    return read_text(source, BackendError) if isinstance(source, Path) else source


def lowerings_with(kernels: Sequence[OwnKernel]) -> Mapping[str, Lowering]:
    """Return the stock lowerings, replaced or extended by the lowerings of these kernels."""
    table = dict(LOWERINGS)
    for kernel in kernels:
        table[kernel.operator] = _lowering(kernel, table.get(kernel.operator))
    return table


def runs(kernel: OwnKernel, node: fx.Node) -> bool:
    """Return whether this kernel, and not the stock kernel, runs a node of its operator."""
    return kernel.applies(_call(node)) is None


def _lowering(kernel: OwnKernel, stock: Lowering | None) -> Lowering:
    """Return a lowering that uses the kernel where it applies, and elsewhere the stock lowering."""

    def supports(node: fx.Node) -> str | None:
        reason = kernel.applies(_call(node))
        if reason is None:
            return None
        if stock is None:
            return f"kernel {kernel.function} does not take it: {reason}"
        return None if stock.supports is None else stock.supports(node)

    def lower(builder: Builder, node: fx.Node) -> None:
        if kernel.applies(_call(node)) is None:
            _launch(kernel, builder, node)
        elif stock is not None:
            stock.of_family(builder.device.family)(builder, node)
        else:
            raise UnsupportedOperatorError(supports(node))

    return Lowering(lower, supports, kernel.kept or (stock is not None and stock.kept))


def _launch(kernel: OwnKernel, builder: Builder, node: fx.Node) -> None:
    call = _call(
        node,
        [builder.value(each) for each in _tensors_of(node)],
        [builder.new(*form) for form in _forms(node.meta["val"])],
    )
    where = f"kernel {kernel.function} for {operator_name(node)}"
    try:
        for name, pack in kernel.packs.items():
            packed = builder.new(tuple(pack.shape(call)), pack.dtype)
            call = replace(call, packed={**call.packed, name: packed})
            steady = builder.steady(call.inputs[pack.input])
            text = STORES_NOTHING + kernel.source if kernel.epilogue else kernel.source
            packing = Kernel(text, pack.function, kernel.options)
            global_size, local_size = _range(pack, call)
            builder.launch(packing, global_size, pack.arguments(call), local_size, steady)
        own = Kernel(kernel.source, kernel.function, kernel.options)
        launch = OwnLaunch(own, kernel.arguments(call), *_range(kernel, call))
        if not kernel.epilogue:
            builder.launch(own, launch.global_size, launch.arguments, launch.local_size)
        elif len(call.outputs) == 1:
            (out,) = call.outputs
            launches = alone(launch.with_stores, out)
            builder.product(out, Tile(out.shape, out.dtype, launches, launch.with_stores))
        else:
            count = len(call.outputs)
            raise BackendError(f"{where}: an epilogue needs 1 result, not {count}")
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"{where}: {type(error).__name__}: {error}") from error
    single = isinstance(node.meta["val"], torch.Tensor)
    builder.result(node, call.outputs[0] if single else call.outputs)


def _range(kernel: OwnKernel | Pack, call: Call) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    local_size = None if kernel.local_size is None else tuple(kernel.local_size(call))
    return tuple(kernel.global_size(call)), local_size


def _call(node: fx.Node, inputs: Sequence[Value] = (), outputs: Sequence[Value] = ()) -> Call:
    """Return a node's call; before lowering, its tensors have only a shape and a dtype."""
    if not inputs and not outputs:
        forms = [form for each in _tensors_of(node) for form in _forms(each.meta["val"])]
        inputs = [Value(-1, *form) for form in forms]
        outputs = [Value(-1, *form) for form in _forms(node.meta["val"])]
    return Call(tuple(inputs), tuple(outputs), node.args, node.kwargs)


def _tensors_of(node: fx.Node) -> list[fx.Node]:
    """Return the tensor arguments in order, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _forms(value: Any) -> list[tuple[tuple[int, ...], str]]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [
        (tuple(map(int, each.shape)), dtype_name(each.dtype))
        for each in values
        if isinstance(each, torch.Tensor)
    ]
