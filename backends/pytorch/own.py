"""Replaces torch's operators with the functions of a subclass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from hetpipe.sdk.graph import canonical, operator_name

Function = Callable[..., Any]


def with_operators(graph: fx.GraphModule, operators: Mapping[str, Function]) -> fx.GraphModule:
    """Return the graph with these functions instead of the operators of the same name."""
    if not any(operator_name(node) in operators for node in graph.graph.nodes):
        return graph
    own = canonical(graph)
    for number, node in enumerate(list(own.graph.nodes)):
        if node.op == "call_function" and operator_name(node) in operators:
            node.target = _apart(operators[operator_name(node)], number)
    return own


def _apart(function: Function, number: int) -> Function:
    """Wrap a function: its results share no memory with its arguments, and its name is unique."""

    def own(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        taken = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        if isinstance(result, (tuple, list)):
            return tuple(_copied(each, taken) for each in result)
        return _copied(result, taken)

    own.__name__ = f"own_{number}"
    return own


def _copied(value: Any, taken: set[int]) -> Any:
    shares = isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in taken
    return value.clone() if shares else value
