"""Counts the operations and bytes of captured programs, operator by operator.

torch's flop counter counts matrix products, convolutions and attention; this file counts hetpipe's
own operators. Any other operator counts as one operation per element of its result; views count 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree
from torch.utils.flop_counter import flop_registry

from hetpipe.capture.program import Program, StageGraphs
from hetpipe.cost.work import Kernel, LayerWork, ProductShape

if TYPE_CHECKING:
    from torch import fx


def products(name: str, arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """Return the matrix products of the operator `name`; empty for other operators.

    For a backward operator, only the products that `output_mask` requests.
    """
    of = _OPERATORS.get(name)
    return () if of is None else of(arguments, result)


def _plain(arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """mm, bmm, addmm and baddbmm: the last two tensors are the factors."""
    left, right = [each for each in arguments if isinstance(each, torch.Tensor)][-2:]
    batches = left.shape[0] if left.dim() == 3 else 1
    return (ProductShape(batches, left.shape[-2], right.shape[-1], left.shape[-1]),)


def _convolution(arguments: Sequence[Any], result: torch.Tensor) -> tuple[ProductShape, ...]:
    """w (channels x taps) times the patches of x (taps x pixels)."""
    x, weight = arguments[:2]
    return (_pixels_of(x, weight, result, arguments[8]),)


def _convolution_backward(arguments: Sequence[Any], result: Any) -> tuple[ProductShape, ...]:
    """The gradient of x is a convolution; the gradient of the weight sums over all pixels."""
    dy, x, weight = arguments[:3]
    transposed, groups = arguments[7], arguments[9]
    want_x, want_weight = arguments[10][:2]
    shapes = [_pixels_of(dy, weight, x, groups)] if want_x else []
    if want_weight:
        inner = x if transposed else dy  # each pixel of `inner` has a window
        pixels = inner.shape[0] * math.prod(inner.shape[2:])
        shapes.append(
            ProductShape(groups, weight.shape[0] // groups, math.prod(weight.shape[1:]), pixels)
        )
    return tuple(shapes)


def _pixels_of(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, groups: int) -> ProductShape:
    """Return the product in which every pixel of y sums the taps of all channels of x in its group.

    For the gradient of a convolution with strides, this includes products with the zeros between
    windows.
    """
    taps = math.prod(weight.shape[2:])
    pixels = y.shape[0] * math.prod(y.shape[2:])
    return ProductShape(groups, y.shape[1] // groups, pixels, x.shape[1] // groups * taps)


_OPERATORS: Mapping[str, Callable[[Sequence[Any], Any], tuple[ProductShape, ...]]] = {
    "mm": _plain, "bmm": _plain, "addmm": _plain, "baddbmm": _plain,
    "convolution": _convolution, "convolution_backward": _convolution_backward,
}  # fmt: skip


VIEWS = frozenset(
    {
        "view", "_unsafe_view", "t", "transpose", "permute", "expand", "select", "slice", "split",
        "split_with_sizes", "unsqueeze", "squeeze", "reshape", "detach", "alias", "getitem",
        "as_strided", "unbind",
    }
)  # fmt: skip
"""Operators that move no bytes."""


def layer_work(stage: StageGraphs, samples: int) -> LayerWork:
    """Return the work of a stage with one layer."""
    passes = stage.passes[samples]
    return LayerWork(
        kernels(passes.forward),
        () if passes.backward is None else kernels(passes.backward),
        () if stage.update is None else kernels(stage.update),
    )


def kernels(program: Program) -> tuple[Kernel, ...]:
    """Return the work of a program's operators, without views."""
    return tuple(kernel for _, kernel in count_calls(program.graph.graph))


def count_calls(graph: fx.Graph) -> Iterator[tuple[fx.Node, Kernel]]:
    """Yield each call of a graph that is not a view, with its work."""
    for node in graph.nodes:
        if node.op != "call_function" or _name(node) in VIEWS:
            continue
        arguments, options = _pytree.tree_map(_value, (node.args, dict(node.kwargs)))
        result = node.meta.get("val")
        nbytes = _nbytes(arguments) + _nbytes(options) + _nbytes(result)
        operations = _operations(node, arguments, options, result)
        yield node, Kernel(operations, nbytes, products(_name(node), arguments, result))


def _operations(
    node: fx.Node, arguments: Sequence[Any], options: Mapping[str, Any], result: Any
) -> float:
    """Return the multiplications plus additions, or for most operators the result's elements."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        return float(flop_registry[packet](*arguments, **options, out_val=result))
    own = OWN.get(_name(node))
    if own is not None:
        return own(arguments)
    return float(sum(tensor.numel() for tensor in _tensors(result)))


def _attention(arguments: Sequence[Any]) -> float:
    """Count two products of queries, keys and values: 2 B H S T D each."""
    query, key = _tensors(arguments)[:2]
    return 4.0 * query.numel() * key.shape[-2]


def _attention_backward(arguments: Sequence[Any]) -> float:
    """Count five products: four for the gradients, and one that computes the weights again."""
    return 2.5 * _attention(arguments[1:])  # the first is the gradient of the result


def _lstm_layer(arguments: Sequence[Any]) -> float:
    """Count, per step and sample, a product with both weights: 2 (inputs + hidden) 4 hidden."""
    tensors = _tensors(arguments)
    weights = [tensor for tensor in tensors if tensor.dim() == 2]
    steps = tensors[0].numel() // tensors[0].shape[-1]
    return 2.0 * steps * sum(weight.numel() for weight in weights)


def _lstm_layer_backward(arguments: Sequence[Any]) -> float:
    """Count twice the forward's products: for the gradients of the inputs and of the weights."""
    return 2.0 * _lstm_layer(arguments)


OWN = {
    "attention": _attention,
    "attention_backward": _attention_backward,
    "masked_attention": _attention,
    "masked_attention_backward": _attention_backward,
    "lstm_layer": _lstm_layer,
    "lstm_layer_backward": _lstm_layer_backward,
}
"""Operations of hetpipe's own operators, by name."""


def _name(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).split(".")[1] if "." in str(node.target) else str(node.target)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, torch.fx.Node) else argument


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each for each in _pytree.tree_leaves(value) if isinstance(each, torch.Tensor)]


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
