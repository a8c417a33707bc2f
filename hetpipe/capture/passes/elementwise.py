"""Checks that an optimizer updates each row of a parameter without reading other rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.slots import is_tensor
from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer
from hetpipe.sdk.graph import operator_name

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.detach.default,
        aten.empty_like.default,
        aten.full_like.default,
        aten.ones_like.default,
        aten.zeros_like.default,
    }
)
"""Operators with independent elements that torch does not tag as pointwise."""


def check_elementwise(
    optimizer: Optimizer, rows: Mapping[str, int], parameters: Mapping[str, Any]
) -> None:
    """Raise `HetpipeError` unless the first rows of a parameter can be updated alone.

    `rows` has the number of first rows by parameter name, and `parameters` has the shapes by name.
    """
    for name, count in rows.items():
        rule, shape = optimizer.rule_for(name), parameters[name].shape
        whole, part = (_operators(rule, (extent, *shape[1:])) for extent in (shape[0], count))
        mixing = next((node for node in whole if _mixes(node)), None)
        if mixing is None and list(map(_describe, whole)) == list(map(_describe, part)):
            continue
        why = "depends on its shape" if mixing is None else f"has {operator_name(mixing)}"
        raise HetpipeError(
            f"split: the update of {optimizer.name} {why}, but a split makes the first"
            f" {count} of {shape[0]} rows of {name} a separate parameter; remove "
            "split, or choose an elementwise optimizer, such as hp.optim.adamw"
        )


def _operators(rule: Optimizer, shape: tuple[int, ...]) -> list[fx.Node]:
    """Return the calls of an update, and of a prediction, of a parameter of this shape."""
    with FakeTensorMode(), torch.no_grad():
        scalar = [torch.empty(()) for _ in range(3)]
        tensors = [torch.empty(shape) for _ in range(2 + len(rule.state))]
        graph = make_fx(_run(rule))(tensors, scalar).graph
    return [node for node in graph.nodes if node.op == "call_function"]


def _run(rule: Optimizer) -> Callable[..., Any]:
    def run(tensors: list[torch.Tensor], scalars: list[torch.Tensor]) -> Any:
        parameter, gradient, *state = tensors
        step, lr, ahead = scalars
        updated = rule.update(parameter, gradient, tuple(state), step, lr)
        if rule.predict is None:
            return updated
        return updated, rule.predict(parameter, tuple(state), step, lr, ahead)

    return run


def _mixes(node: fx.Node) -> bool:
    """Return whether an element of the result may depend on several elements of an argument."""
    target: Any = node.target
    reads_elements = any(is_tensor(n) and n.meta["val"].ndim for n in node.all_input_nodes)
    pointwise = torch.Tag.pointwise in getattr(target, "tags", ()) or target in _ELEMENTWISE
    return reads_elements and not pointwise


def _describe(node: fx.Node) -> str:
    return f"{node.target}{node.args}{node.kwargs}"
