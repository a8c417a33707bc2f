"""The flat graph: a whole model and its loss as one functional graph whose inputs have roles."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from hetpipe.capture.precision import Precision
from hetpipe.capture.program import BUFFER, OUTPUT, PARAM
from hetpipe.capture.slots import Key
from hetpipe.sdk.host.parts import reachable

PARAMETRIZATIONS = "parametrizations"
"""Name of the child module in which torch keeps the parametrizations of a module's tensors."""


@dataclass
class FlatGraph:
    """A functional graph of `samples` samples.

    `free` nodes depend only on constants and unchanging buffers: each stage computes the free nodes
    that it uses. `layer` gives the layer number of every other call. `rows` gives, for every
    parameter that is split in two, the number of rows in its first part.
    """

    samples: int
    graph: fx.Graph
    inputs: dict[fx.Node, Key]
    outputs: list[tuple[Key, fx.Node]]
    constants: dict[str, torch.Tensor]
    free: set[fx.Node] = field(default_factory=set)
    differentiable: set[fx.Node] = field(default_factory=set)
    layer: dict[fx.Node, int] = field(default_factory=dict)
    layer_names: tuple[str, ...] = ()
    precision: Precision = Precision()  # noqa: RUF009 - frozen
    rows: dict[str, int] = field(default_factory=dict)

    @property
    def updated_buffers(self) -> frozenset[str]:
        """Names of the buffers that the forward changes."""
        return frozenset(name for (role, name), _ in self.outputs if role == BUFFER)

    def without_loss(self) -> FlatGraph:
        """Return the part of the graph that computes the model's output."""
        outputs = [(key, node) for key, node in self.outputs if key[0] == OUTPUT]
        used = reachable([node for _, node in outputs], self.inputs)
        layer = {node: index for node, index in self.layer.items() if node in used}
        return replace(self, outputs=outputs, layer=layer)


def owner(node: fx.Node) -> tuple[str, str]:
    """Return the innermost module of a node, as (a key for this call of the module, its path).

    A parametrization (`weight_norm` at `a.parametrizations.weight.0`) belongs to its module, `a`.
    """
    stack = node.meta.get("nn_module_stack") or {}
    entries = [(key, path) for key, (path, _) in stack.items() if path.split(".")[0] == "model"]
    if not entries:
        return "", ""
    key, path = entries[-1]
    path = path.partition(f".{PARAMETRIZATIONS}.")[0]
    key = next((k for k, p in reversed(entries) if p == path), key)
    return key, path.removeprefix("model").removeprefix(".")


def parameters_of(flat: FlatGraph) -> frozenset[str]:
    """Return the names of the parameters that a graph reads."""
    return frozenset(name for n, (role, name) in flat.inputs.items() if role == PARAM and n.users)


def is_getitem(node: fx.Node) -> bool:
    """Return whether the node picks one result of an operator with several results."""
    return node.target is operator.getitem
