"""The float64 reference: torch's eager operators on this processor, and their rounding noise.

A node's value is the float64 result of its operator for the given inputs, rounded once to the dtype
that the graph declares. The value overflows where this dtype overflows. The reference uses no
backend, so it can judge any device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from hetpipe.check.difference import (
    UNITS,
    Array,
    eps_of,
    largest_of,
    tensor_difference,
    tolerance,
)
from hetpipe.errors import HetpipeError
from hetpipe.sdk.graph import graph_inputs, operator_name
from hetpipe.sdk.operators.recurrent import is_workspace

Value = Any
"""A tensor, or a tuple of tensors and None."""
Values = Mapping[fx.Node, Value]

_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv")
_LONG_SUMS = ("conv", "lstm", "attention", "scatter", "put", "norm", "embedding", "loss", "cumsum")
"""Words in the names of operators whose sums may run over a whole tensor."""


def float64_results(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> list[Array]:
    """Run a function and return its results; its floating inputs and new tensors are float64."""
    with default_dtype(torch.float64):
        results = tensors_of(function(*to_float64(list(inputs))))
    return [tensor.detach().numpy() for tensor in results]


def reference_values(
    graph: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    disturb: Callable[[fx.Node, Value], Value] = lambda node, value: value,
) -> dict[fx.Node, Value]:
    """Return the value of every node; `disturb` may add an error to each result."""
    values: dict[fx.Node, Value] = dict(zip(graph_inputs(graph), inputs, strict=True))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = disturb(node, exact_value(node, arguments))
    return values


def exact_value(node: fx.Node, arguments: Any) -> Value:
    """Return the exact result of a node for (args, kwargs), rounded to the node's dtype.

    Raises `HetpipeError` if torch cannot compute the node.
    """
    if node.target is operator.getitem:
        return arguments[0][0][arguments[0][1]]
    try:
        value = _call(node, to_float64(arguments))
    except (RuntimeError, TypeError):  # the operator lacks float64
        try:
            return _call(node, arguments)
        except (RuntimeError, TypeError) as error:
            raise HetpipeError(f"torch cannot judge {operator_and_layer(node)}: {error}") from error
    if not _may_overflow(arguments):
        return value
    is_sum = terms_of(node) > 1 and all(bool(x.isfinite().all()) for x in _floats(arguments))
    return _with_overflow(value, narrow_value(node, arguments), is_sum)


def narrow_value(node: fx.Node, arguments: Any) -> Value:
    """Compute a node in the graph's dtypes, or in float64 if torch's operator lacks them."""
    try:
        return _call(node, arguments)
    except (RuntimeError, TypeError):
        return _call(node, to_float64(arguments))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value or of nested lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def to_float64(values: Any) -> Any:
    """Convert the floating tensors and floating dtypes of nested values to float64."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value

    return tree_map(wide, values)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set the default dtype of new torch tensors within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def is_comparable(node: fx.Node) -> bool:
    """Return False for uninitialised memory and for a workspace (see `is_workspace`), else True."""
    return "empty" not in operator_name(node) and not is_workspace(node)


def terms_of(node: fx.Node) -> int:
    """Return the number of terms in a node's longest sum, or an upper bound."""
    name = operator_name(node).split(".")[1] if "." in operator_name(node) else ""
    metas = [source.meta.get("val") for source in node.all_input_nodes]
    read = [meta for meta in metas if isinstance(meta, torch.Tensor)]
    sizes = [tensor.numel() for tensor in read]
    results = [tensor.numel() for tensor in tensors_of(node.meta.get("val"))]
    if not sizes or not results or min(results) == 0:
        return 1
    if name in _PRODUCTS:
        matrix: Any = node.args["add" in name]
        return max(int(matrix.meta["val"].shape[-1]), 1)
    if "softmax" in name:
        return max(read[0].shape, default=1)
    if any(word in name for word in _LONG_SUMS):
        return max(sizes)
    return max(1, max(sizes) // min(results))


def layer_of(node: fx.Node) -> str:
    """Return the model layer of a node; `?` for nodes without one, such as an update's."""
    return str(node.meta.get("layer", "?"))


def operator_and_layer(node: fx.Node) -> str:
    """Return the operator and layer of a node, for messages."""
    return f"{operator_name(node)} of layer {layer_of(node)}"


def call_of(node: fx.Node) -> fx.Node:
    """Return the call whose result a `getitem` node reads; for another node, the node itself."""
    return node.all_input_nodes[0] if operator_name(node) == "getitem" else node


def _call(node: fx.Node, arguments: Any) -> Value:
    args, kwargs = arguments
    with torch.no_grad():
        result: Any = node.target(*args, **kwargs)  # type: ignore[operator] # an operator
    return _as_declared(result, node.meta["val"])


def _as_declared(result: Any, meta: Any) -> Value:
    """Return a result in the graph's dtype and in row-major order."""
    if isinstance(meta, (tuple, list)):
        return tuple(_as_declared(*pair) for pair in zip(result, meta, strict=True))
    if not isinstance(result, torch.Tensor):
        return None
    dtype = meta.dtype if isinstance(meta, torch.Tensor) else result.dtype
    return result.to(dtype).contiguous()


def _may_overflow(arguments: Any) -> bool:
    """Return whether intermediate products or sums may overflow although the result does not."""
    return any(
        float(tensor.abs().nan_to_num(nan=0.0).max()) > torch.finfo(tensor.dtype).max ** 0.375
        for tensor in _floats(arguments)
        if tensor.numel()
    )


def _floats(arguments: Any) -> list[torch.Tensor]:
    args, kwargs = arguments
    return [t for t in tensors_of([*args, *kwargs.values()]) if t.is_floating_point()]


def _with_overflow(exact: Value, narrow: Value, is_sum: bool) -> Value:
    """Return the exact value with the infinities that torch yields in the graph's dtypes.

    A sum that overflows becomes NaN, and comparisons skip NaN: devices add terms in different
    orders, and the order decides whether infinities of both signs meet.
    """
    if isinstance(exact, tuple):
        return tuple(_with_overflow(*pair, is_sum) for pair in zip(exact, narrow, strict=True))
    if not isinstance(exact, torch.Tensor) or not exact.is_floating_point():
        return exact
    if is_sum:
        return torch.where(narrow.isfinite() & exact.isfinite(), exact, math.nan)
    return torch.where(narrow.isfinite(), exact, narrow)


def with_rounding_errors(value: Any, generator: torch.Generator, units: float = UNITS) -> Any:
    """Add to a floating tensor a random relative error of up to `units` eps per element."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    noise = _noise(value, generator) * units * eps_of(value.dtype)
    return (value.double() * (1 + noise)).to(value.dtype)


def disturb_node(generator: torch.Generator, node: fx.Node, value: Value) -> Value:
    """Return a node's value with random rounding errors, as large as its operator may cause."""
    if isinstance(value, tuple):
        return tuple(disturb_node(generator, node, item) for item in value)
    disturbed = with_rounding_errors(value, generator)
    terms = terms_of(node)
    if disturbed is value or terms == 1 or not value.numel():
        return disturbed
    allowed = tolerance(largest_of(value.double().numpy()), eps_of(value.dtype), terms)
    return (disturbed.double() + _noise(value, generator) * allowed).to(value.dtype)


def rounding_effects(node: fx.Node, arguments: Any, expected: Value) -> list[float]:
    """Return, for each tensor of `expected`, a device's possible error beyond the tolerance.

    This error covers torch's error in the graph's dtypes, and the effect of rounding errors in the
    inputs, which sums with cancelling terms amplify.
    """
    generator = torch.Generator().manual_seed(0)
    units = tolerance(1.0, 1.0, terms_of(node))
    disturb = partial(with_rounding_errors, generator=generator, units=units)
    values = [narrow_value(node, arguments)]
    values += [exact_value(node, tree_map(disturb, arguments)) for _ in range(2)]
    columns = zip(*map(tensors_of, values), strict=True)
    return [
        2 * max(tensor_difference(value, right, 1).error for value in column)
        for column, right in zip(columns, tensors_of(expected), strict=True)
    ]


def _noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers between -1 and 1 in the shape of a tensor."""
    return torch.rand(tensor.shape, generator=generator, dtype=torch.float64) * 2 - 1
