"""Chains: cost tables for planners that assume equal devices."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from hetpipe.cost.pipedream_profile import ChainCosts
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError


def chain_of(table: CostTable, devices: Sequence[str]) -> ChainCosts:
    """Return the layers' costs on a device with the mean times of these devices. A layer's mean is
    over the devices that can run the layer; it is infinite if none can."""
    costs = [table.devices[device] for device in devices]
    rows = list(zip(*(cost.layers for cost in costs), strict=True))
    return ChainCosts(
        names=tuple(layer.name for layer in table.layers),
        forward_s=tuple(mean_s([entry.forward_s for entry in row]) for row in rows),
        backward_s=tuple(mean_s([entry.backward_s for entry in row]) for row in rows),
        activation_nbytes=tuple(layer.saved_nbytes for layer in table.layers),
        params_nbytes=tuple(layer.params_nbytes for layer in table.layers),
        cut_nbytes=(*(layer.cut_nbytes for layer in table.layers[:-1]), 0),
    )


def mean_s(times_s: Sequence[float]) -> float:
    """Return the mean of the finite times; infinity if no time is finite."""
    finite = [time_s for time_s in times_s if isfinite(time_s)]
    return sum(finite) / len(finite) if finite else inf


def check_finite(chain: ChainCosts) -> None:
    """Raise `PlanError` for a chain without layers, or with a layer whose time is not finite."""
    if not chain.names:
        raise PlanError("the chain has 0 layers; give 1 or more")
    for name, *times_s in zip(chain.names, chain.forward_s, chain.backward_s, strict=True):
        if not all(map(isfinite, times_s)):
            raise PlanError(
                f"layer {name} takes {times_s[0]} s forward and {times_s[1]} s backward: no device "
                "can run it; add one that can"
            )
