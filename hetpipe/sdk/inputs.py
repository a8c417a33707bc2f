"""Checks that the inputs of a run have the forms of its compiled graph, for all backends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hetpipe.errors import BackendError

if TYPE_CHECKING:
    from torch import fx

    from hetpipe.sdk.backend import Buffer

Form = tuple[tuple[int, ...], str]
"""(shape, dtype) of a tensor."""


def input_forms(graph: fx.GraphModule) -> tuple[Form, ...]:
    """Return the form of every placeholder, in order."""
    from hetpipe.sdk.graph import graph_inputs

    return tuple(map(form_of, graph_inputs(graph)))


def form_of(node: fx.Node) -> Form:
    """Return the form that a graph declares for a node's tensor."""
    from hetpipe.sdk.graph import dtype_name

    value = node.meta["val"]
    return tuple(map(int, value.shape)), dtype_name(value.dtype)


def check_inputs(device_id: str, inputs: Sequence[Buffer], forms: Sequence[Form]) -> None:
    """Raise `BackendError` unless `inputs` have the forms of the compiled graph."""
    if len(inputs) != len(forms):
        raise BackendError(f"{device_id}: the graph takes {len(forms)} inputs, got {len(inputs)}")
    for number, (buffer, (shape, dtype)) in enumerate(zip(inputs, forms, strict=True)):
        if buffer.shape != shape or buffer.dtype != dtype:
            raise BackendError(
                f"{device_id}: input {number} is {buffer.dtype}{list(buffer.shape)}, but the graph "
                f"was compiled for {dtype}{list(shape)}: compile the graph for these inputs too"
            )
