"""Splits a layer into two layers by output channels, so that a cut can separate them.

The first part computes the first channels. The second part computes the other channels from the
layer's input, joins both results and runs the remaining operators. A cut between the parts carries
the input and the partial output, as in BaPipe's intra-layer partition (section 3.3.2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.program import PARAM
from hetpipe.errors import PlanError
from hetpipe.optim.rule import Optimizer
from hetpipe.sdk.graph import operator_name
from hetpipe.sdk.host.parts import reachable
from hetpipe.words import choices

Array = np.ndarray[Any, Any]


def part_names(name: str, rows: int) -> tuple[str, str]:
    """Return the names of the first `rows` rows of a tensor, and of its other rows."""
    return f"{name}[:{rows}]", f"{name}[{rows}:]"


class SplitParameters:
    """Translates between the names of a model and the names of its graphs.

    `rows` has the number of rows in the first part of each split parameter. Its gradient has the
    same name, and an optimizer state has the name "STATE/PARAMETER"; these are split like the
    parameter.
    """

    def __init__(self, rows: Mapping[str, int]) -> None:
        self.rows = dict(rows)
        self._whole = {part: name for name in rows for part in part_names(name, rows[name])}

    def whole(self, name: str) -> str:
        """Return the model's name for a name in the graphs."""
        parameter = _parameter(name, self._whole)
        return name.removesuffix(parameter) + self._whole.get(parameter, parameter)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names in the graphs for a name in the model."""
        rows = self.rows.get(_parameter(name, self.rows))
        return (name,) if rows is None else part_names(name, rows)

    def split(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Convert values by the model's names to values by the graphs' names."""
        parts: dict[str, Array] = {}
        for name, value in values.items():
            rows = self.rows.get(_parameter(name, self.rows))
            pieces = [value] if rows is None else np.split(np.atleast_1d(value), [rows])
            parts.update(zip(self.names(name), pieces, strict=True))
        return parts

    def join(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Convert values by the graphs' names to values by the model's names."""
        joined: dict[str, Array] = {}
        for whole in dict.fromkeys(map(self.whole, values)):
            pieces = [values[name] for name in self.names(whole)]
            joined[whole] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        return joined

    def rules(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer for the graphs' names: a part is in its parameter's group."""
        return optimizer.renamed(self.whole) if self.rows else optimizer


def _parameter(name: str, known: Mapping[str, object]) -> str:
    """Return the name if it is a `known` parameter; otherwise its part after the last slash."""
    return name if name in known else name.rpartition("/")[2]


aten = torch.ops.aten

_CHANNELS: dict[Any, int] = {
    aten.linear.default: -1,
    aten.conv1d.default: -2,
    aten.conv1d.padding: -2,
    aten.conv2d.default: -3,
    aten.conv2d.padding: -3,
}
"""The operators that can be split, with the dimension of the output channels. Their arguments are
(input, weight, bias, ...)."""
_GROUPS = 6
"""Index of a convolution's argument `groups`."""


def split_layers(flat: FlatGraph, channels: Mapping[str, int], tied: Collection[str]) -> None:
    """Split each layer that `channels` names, after the given number of output channels.

    `tied` has the parameters with several names in the model. `flat.rows` gets, for every split
    parameter, the number of rows in its first part. Raises `PlanError` for a layer that cannot be
    split.
    """
    for layer in channels:
        if layer not in flat.layer_names:
            layers = choices(layer, flat.layer_names)
            raise PlanError(f"split: the model has no layer {layer!r}; {layers}")
    for layer, count in channels.items():
        _split(flat, layer, count, tied)
    nodes = list(flat.graph.nodes)
    flat.layer = {node: flat.layer[node] for node in nodes if node in flat.layer}
    flat.inputs = {node: flat.inputs[node] for node in nodes if node in flat.inputs}


def splittable(flat: FlatGraph, tied: Collection[str]) -> dict[str, int]:
    """Return the number of output channels, 2 or more, of each layer that can be split."""
    channels = {}
    for index, layer in enumerate(flat.layer_names):
        try:
            product = _product(flat, layer, index)
            for argument in product.args[1:3]:
                if isinstance(argument, fx.Node):
                    _check_source(flat, layer, _chain(argument)[0], tied)
        except PlanError:
            continue
        weight = _chain(product.args[1])[0]
        if (count := weight.meta["val"].shape[0]) > 1:
            channels[layer] = count
    return channels


def _split(flat: FlatGraph, layer: str, count: int, tied: Collection[str]) -> None:
    index = flat.layer_names.index(layer)
    product = _product(flat, layer, index)
    arguments = [node for node in product.args[1:3] if isinstance(node, fx.Node)]
    chains = [_chain(node) for node in arguments]
    for source, *_ in chains:
        _check_source(flat, layer, source, tied)
    channels = chains[0][0].meta["val"].shape[0]
    if not 1 <= count < channels:
        raise PlanError(
            f"split: {layer} has {channels} output channels, so its first part can have 1 to "
            f"{channels - 1}, not {count}"
        )
    _renumber(flat, index, product)
    parts = [_add_part(flat, product, chains, count, number) for number in (0, 1)]
    _join(flat, product, parts)
    for source, *_ in chains:
        flat.rows[flat.inputs[source][1]] = count
    for node in (product, *(node for chain in chains for node in reversed(chain))):
        flat.graph.erase_node(node)
        flat.layer.pop(node, None)
        flat.inputs.pop(node, None)
        flat.differentiable.discard(node)
    names = flat.layer_names
    flat.layer_names = (*names[:index], *part_names(layer, count), *names[index + 1 :])


def _product(flat: FlatGraph, layer: str, index: int) -> fx.Node:
    """Return the layer's linear operator or convolution. Raises `PlanError` for other layers."""
    weights = [
        node
        for node, (role, _) in flat.inputs.items()
        if role == PARAM
        and node.meta["val"].ndim >= 2
        and any(flat.layer.get(reader) == index for reader in _readers(node))
    ]
    products = [
        reader
        for weight in weights
        for reader in _readers(weight)
        if flat.layer.get(reader) == index
    ]
    fits = len(products) == 1 and products[0].target in _CHANNELS
    if not fits or _chain(products[0].args[1])[0] is not weights[0]:
        operators = ", ".join(dict.fromkeys(map(operator_name, products))) or "no operator"
        names = ", ".join(flat.inputs[weight][1] for weight in weights) or "a weight"
        raise PlanError(
            f"split: {layer} computes {operators} with {names}; only a layer with a single linear "
            "operator or convolution of 1 or 2 dimensions can be split"
        )
    product = products[0]
    groups = product.args[_GROUPS] if len(product.args) > _GROUPS else 1
    if groups != 1:
        raise PlanError(
            f"split: {layer} is a convolution of {groups} groups; name layers of 1 group only"
        )
    return product


def _check_source(flat: FlatGraph, layer: str, source: fx.Node, tied: Collection[str]) -> None:
    """Raise `PlanError` unless `source` is a parameter that only this layer reads."""
    role, name = flat.inputs.get(source, ("", source.name))
    if role != PARAM:
        raise PlanError(f"split: {layer} computes with {name}, which is not a parameter")
    count = len(list(_readers(source)))
    if count > 1 or name in tied:
        why = "has several names" if name in tied else f"is read {count} times, not once"
        raise PlanError(
            f"split: {layer} cannot be split: its parameter {name} {why}; leave this layer whole"
        )


def _chain(node: object) -> list[fx.Node]:
    """Return a source and the casts from it that lead to `node`."""
    assert isinstance(node, fx.Node)
    before = _chain(node.args[0]) if node.target is aten._to_copy.default else []
    return [*before, node]


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a node, or a cast of it."""
    for user in node.users:
        if user.target is aten._to_copy.default:
            yield from _readers(user)
        else:
            yield user


def _renumber(flat: FlatGraph, index: int, product: fx.Node) -> None:
    """Make room for a layer after `index`; layer `index` keeps the nodes that `product` needs."""
    outside = [node for node, layer in flat.layer.items() if layer != index]
    kept = reachable([product], outside)
    for node, layer in flat.layer.items():
        if layer > index or (layer == index and node not in kept):
            flat.layer[node] = layer + 1


def _add_part(
    flat: FlatGraph, product: fx.Node, chains: Sequence[Sequence[fx.Node]], count: int, number: int
) -> fx.Node:
    """Add part 0 (the first `count` channels of `product`) or part 1, with its own parameters."""
    layer = flat.layer[product] + number
    copies: dict[fx.Node, fx.Node] = {}

    def resize(node: fx.Node, dimension: int) -> None:
        copy, shape = copies[node], list(node.meta["val"].shape)
        shape[dimension] = shape[dimension] - count if number else count
        copy.meta = {**node.meta, "val": node.meta["val"].new_empty(shape)}
        if node in flat.differentiable:
            flat.differentiable.add(copy)

    for source, *casts in chains:
        role, name = flat.inputs[source]
        part = part_names(name, count)[number]
        with flat.graph.inserting_before(source):
            copies[source] = flat.graph.placeholder(f"{source.name}_part{number}")
        flat.inputs[copies[source]] = role, part
        resize(source, 0)
        for cast in casts:
            _copy(flat, cast, product, copies, layer)
            resize(cast, 0)
    _copy(flat, product, product, copies, layer)
    resize(product, _CHANNELS[product.target])
    return copies[product]


def _copy(
    flat: FlatGraph, node: fx.Node, before: fx.Node, copies: dict[fx.Node, fx.Node], layer: int
) -> None:
    """Copy a call into `copies`; its arguments are replaced by their copies."""
    with flat.graph.inserting_before(before):
        copies[node] = flat.graph.node_copy(node, lambda argument: copies.get(argument, argument))
    flat.layer[copies[node]] = layer


def _join(flat: FlatGraph, product: fx.Node, parts: list[fx.Node]) -> None:
    """Replace `product` by both parts, joined."""
    with flat.graph.inserting_before(product):
        dimension = _CHANNELS[product.target]
        joined = flat.graph.call_function(aten.cat.default, (parts, dimension))
    joined.meta = dict(product.meta)
    flat.layer[joined] = flat.layer[parts[1]]
    if product in flat.differentiable:
        flat.differentiable.add(joined)
    product.replace_all_uses_with(joined)
    flat.outputs = [(key, joined if node is product else node) for key, node in flat.outputs]
