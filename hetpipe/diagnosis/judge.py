"""The judge: torch on the controller's processor, which computes every node of a graph in float64.

A node's value is rounded to the dtype that the graph declares, so it is the operator's exact result
for the inputs at hand, rounded once. Overflow is therefore that of the declared dtype. No backend
takes part: any device can be judged, those of the reference backend too.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from hetpipe.errors import HetpipeError
from hetpipe.sdk.graph import graph_inputs, operator_name
from hetpipe.sdk.recurrent import is_workspace

Value = Any
"""A tensor, or a tuple of tensors and None."""
Values = Mapping[fx.Node, Value]

FACTOR = 16.0
"""Rounding errors of a node that are allowed: units of sqrt(terms) * eps * largest magnitude."""


_LONG_SUMS = ("conv", "lstm", "attention", "scatter", "put", "norm", "embedding", "loss", "cumsum")
"""Words in the names of operators whose sums may run over a whole tensor."""


def judged(
    graph: fx.GraphModule, inputs: Sequence[torch.Tensor], noise: torch.Generator | None = None
) -> dict[fx.Node, Value]:
    """The value of every node. With `noise` each is off by a random error that is allowed."""
    values: dict[fx.Node, Value] = dict(zip(graph_inputs(graph), inputs, strict=True))
    for node in graph.graph.nodes:
        if node.op == "call_function":
            arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            value = exactly(node, arguments)
            values[node] = value if noise is None else _disturbed(node, value, noise)
    return values


def exactly(node: fx.Node, arguments: Any) -> Value:
    """The exact result of a node for these (args, kwargs), rounded to its dtype."""
    if node.target is operator.getitem:
        return arguments[0][0][arguments[0][1]]
    try:
        value = _called(node, widened(arguments))
    except (RuntimeError, TypeError):  # an operator without float64
        try:
            return _called(node, arguments)
        except (RuntimeError, TypeError) as error:
            raise HetpipeError(
                f"torch cannot judge {operator_name(node)} of layer {layer_of(node)}: {error}"
            ) from error
    if not _is_large(arguments):
        return value
    is_sum = terms_of(node) > 1 and all(bool(each.isfinite().all()) for each in _floats(arguments))
    return _overflown(value, plainly(node, arguments), is_sum)


def plainly(node: fx.Node, arguments: Any) -> Value:
    """The result of a node by torch in the graph's own dtypes, or wider where it must be."""
    try:
        return _called(node, arguments)
    except (RuntimeError, TypeError):
        return _called(node, widened(arguments))


def widened(arguments: Any) -> Any:
    """The same arguments with float64 in place of each dtype of floats."""

    def wide(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return value.double()
        if isinstance(value, torch.dtype) and value.is_floating_point:
            return torch.float64
        return value

    return _mapped(arguments, wide)


def layer_of(node: fx.Node) -> str:
    """The layer of the model that a node came from; `?` for an update, which has none."""
    return str(node.meta.get("layer", "?"))


def tensors_of(value: Value) -> list[torch.Tensor]:
    """The tensors of a node's value."""
    items = value if isinstance(value, (tuple, list)) else [value]
    return [item for item in items if isinstance(item, torch.Tensor)]


def is_comparable(node: fx.Node) -> bool:
    """Whether a node's value is determined: not uninitialised, and no backend's own workspace."""
    return "empty" not in operator_name(node) and not is_workspace(node)


def terms_of(node: fx.Node) -> int:
    """The number of terms in a node's longest sum, or more."""
    name = operator_name(node).split(".")[1] if "." in operator_name(node) else ""
    shapes: list[tuple[int, ...]] = [
        tuple(each.meta["val"].shape)
        for each in node.all_input_nodes
        if isinstance(each.meta.get("val"), torch.Tensor)
    ]
    sizes = [math.prod(shape) for shape in shapes]
    results = [tensor.numel() for tensor in tensors_of(node.meta.get("val"))]
    if not sizes or not results or min(results) == 0:
        return 1
    if name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv"):
        matrix: Any = node.args["add" in name]
        return max(int(matrix.meta["val"].shape[-1]), 1)
    if "softmax" in name:
        return max(shapes[0], default=1)
    if any(word in name for word in _LONG_SUMS):
        return max(sizes)
    return max(1, max(sizes) // min(results))


@dataclass(frozen=True)
class Difference:
    """The largest error of a tensor, and the one that is allowed; of integers, how many differ.

    The error is infinite where a value is not finite that should be, or has another shape.
    """

    error: float
    allowed: float

    @property
    def parts(self) -> bool:
        """Whether the error is larger than allowed."""
        return not self.error <= self.allowed


def difference(
    actual: torch.Tensor, expected: torch.Tensor, terms: int, eps: float | None = None
) -> Difference:
    """Compare where the expected value is finite. `eps` is that of the coarsest dtype involved."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(math.inf, 0.0)
    if not expected.is_floating_point():
        return Difference(float((actual != expected).sum()), 0.0)
    finite = expected.isfinite()
    right = expected[finite].double()
    if right.numel() == 0:
        return Difference(0.0, 0.0)
    error = (actual[finite].double() - right).abs().nan_to_num(nan=math.inf).max()
    about = torch.finfo(expected.dtype)
    unit = max(eps or 0.0, about.eps) * float(right.abs().max())
    return Difference(float(error), FACTOR * math.sqrt(terms) * unit + FACTOR * about.tiny)


def spread(values: Sequence[torch.Tensor], expected: torch.Tensor) -> float:
    """The largest difference of any of these values from the expected one."""
    return max((difference(value, expected, 1).error for value in values), default=0.0)


def eps_of(tensors: Sequence[torch.Tensor]) -> float:
    """The machine epsilon of the coarsest dtype among them."""
    return max((torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()), default=0.0)


def node_spread(node: fx.Node, arguments: Any, expected: Value) -> list[float]:
    """By tensor of a node's value, the error that a device may have beyond the usual bound.

    It is that of torch in the graph's own dtypes, and the effect of inputs that are off by
    rounding: of sums that cancel, for instance.
    """
    generator = torch.Generator().manual_seed(0)
    relative = FACTOR * math.sqrt(terms_of(node))
    others = [plainly(node, arguments)]
    for _ in range(2):
        others.append(exactly(node, _mapped(arguments, partial(_off, relative, generator))))
    lists = [tensors_of(other) for other in others]
    return [
        2 * spread([own[index] for own in lists], right)
        for index, right in enumerate(tensors_of(expected))
    ]


def off_by_rounding(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the tensor with a random rounding error in every element, as large as is allowed."""
    disturbed: torch.Tensor = _off(FACTOR, generator, tensor)
    return disturbed


def _called(node: fx.Node, arguments: Any) -> Value:
    args, kwargs = arguments
    with torch.no_grad():
        result: Any = node.target(*args, **kwargs)  # type: ignore[operator] # an operator
    return _declared(result, node.meta["val"])


def _declared(result: Any, meta: Any) -> Value:
    """The result in the dtype of the graph, row-major."""
    if isinstance(meta, (tuple, list)):
        return tuple(_declared(item, own) for item, own in zip(result, meta, strict=True))
    if not isinstance(result, torch.Tensor):
        return None
    dtype = meta.dtype if isinstance(meta, torch.Tensor) else result.dtype
    return result.to(dtype).contiguous()


def _is_large(arguments: Any) -> bool:
    """Whether products of inputs, or their sums, may overflow where the result does not."""
    return any(
        float(tensor.abs().nan_to_num(nan=0.0).max()) > torch.finfo(tensor.dtype).max ** 0.375
        for tensor in _floats(arguments)
        if tensor.numel()
    )


def _floats(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of floats among arguments."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _floats(item)


def _overflown(exact: Value, plain: Value, is_sum: bool) -> Value:
    """The exact value, but what torch overflows to in the graph's dtypes.

    Of a sum it is not a number: the order of its terms, which is a device's own, decides whether
    infinities of both signs meet. What is computed from it is not determined either.
    """
    if isinstance(exact, tuple):
        pairs = zip(exact, plain, strict=True)
        return tuple(_overflown(own, other, is_sum) for own, other in pairs)
    if not isinstance(exact, torch.Tensor) or not exact.is_floating_point():
        return exact
    if is_sum:
        return torch.where(plain.isfinite() & exact.isfinite(), exact, math.nan)
    return torch.where(plain.isfinite(), exact, plain)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, change) for key, item in value.items()}
    return change(value)


def _off(relative: float, generator: torch.Generator, value: Any) -> Any:
    """A tensor with a relative error in every element, in units of its eps."""
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
        return value
    by = (torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1) * relative
    return (value.double() * (1 + by * torch.finfo(value.dtype).eps)).to(value.dtype)


def _disturbed(node: fx.Node, value: Value, generator: torch.Generator) -> Value:
    """A node's value with errors that are allowed."""
    if isinstance(value, tuple):
        return tuple(_disturbed(node, item, generator) for item in value)
    if not (isinstance(value, torch.Tensor) and value.is_floating_point()) or not value.numel():
        return value
    disturbed = _off(FACTOR, generator, value)
    terms = terms_of(node)
    if terms > 1:
        largest = float(value.double().nan_to_num(0.0, 0.0, 0.0).abs().max())
        unit = FACTOR * math.sqrt(terms) * torch.finfo(value.dtype).eps * largest
        by = torch.rand(value.shape, generator=generator, dtype=torch.float64) * 2 - 1
        disturbed = (disturbed.double() + by * unit).to(value.dtype)
    return disturbed
