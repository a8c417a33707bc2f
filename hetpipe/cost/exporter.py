"""The exporter: writes a device of a cost table as a profile in PipeDream's format."""

from __future__ import annotations

from itertools import pairwise

from hetpipe.cost.pipedream_profile import ProfileGraph, ProfileNode
from hetpipe.cost.table import CostTable
from hetpipe.errors import CostError
from hetpipe.words import word, words


def graph_of(table: CostTable, device: str) -> ProfileGraph:
    """Return the layers of a table on one device, in the form that `write_profile` writes.

    Each layer's times include the fixed part of a compute action, so their sum counts it once per
    layer. `activation_size` is the bytes that a layer keeps for its backward. The format has no
    place for bytes across cuts (a reader takes the kept bytes), updates and optimizer state,
    spreads, memory, links, shared parameters and the micro-batch. A node's description holds the
    layer's name.

    Raises `CostError` for a device that is not in the table, or that cannot run a layer.
    """
    if device not in table.devices:
        raise CostError(f"no costs for {word(device)}; the table has {words(table.devices)}")
    nodes = []
    for index, (layer, cost) in enumerate(
        zip(table.layers, table.devices[device].layers, strict=True), start=1
    ):
        if cost.impossible:
            why = f"{device} cannot run {layer.name}: {cost.reason or 'its time is infinite'}"
            raise CostError(f"{why}; export another of {', '.join(table.devices)}")
        # In brackets: readers drop nodes whose description begins with Input.
        description = f"Layer({' '.join(layer.name.split())})"
        nodes.append(
            ProfileNode(
                f"node{index}",
                description,
                cost.forward_s,
                cost.backward_s,
                layer.saved_nbytes,
                layer.params_nbytes,
            )
        )
    names = [node.name for node in nodes]
    return ProfileGraph(tuple(nodes), tuple(pairwise(names)))
