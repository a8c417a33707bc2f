"""Costs of a model after a layer is split by output channels (BaPipe, section 3.3.2)."""

from __future__ import annotations

from dataclasses import replace

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost
from hetpipe.errors import CostError


def split_costs(table: CostTable, layer: str, names: tuple[str, str], share: float) -> CostTable:
    """Return the table with a layer replaced by two parts, with `share` and 1 - `share` of its
    work.

    Both parts read the layer's input. So the input and the first part's output cross a cut between
    the parts. Raises `CostError` for an unknown layer, for the first layer, because the table lacks
    the bytes of its input, and for a layer that shares a parameter.
    """
    index = next((n for n, each in enumerate(table.layers) if each.name == layer), -1)
    if index < 0:
        raise CostError(f"no layer {layer!r}; the table has {len(table.layers)} others")
    if index == 0 or any(index in shared.layers for shared in table.tied):
        why = "is the first layer" if index == 0 else "shares a parameter with another layer"
        raise CostError(f"{layer} {why}, so its costs cannot be split; name another layer")
    tied = tuple(
        replace(shared, layers=tuple(n + (n > index) for n in shared.layers))
        for shared in table.tied
    )
    before, whole = table.layers[index - 1], table.layers[index]
    sent_nbytes = before.cut_nbytes + round(share * whole.cut_nbytes)
    parts = (
        _bytes(whole, names[0], share, sent_nbytes),
        _bytes(whole, names[1], 1 - share, whole.cut_nbytes),
    )
    layers = (*table.layers[:index], *parts, *table.layers[index + 1 :])
    kinds = {id(cost.layers): cost for cost in table.devices.values()}
    rows = {kind: _row(cost, index, share) for kind, cost in kinds.items()}
    devices = {
        id_: replace(cost, layers=rows[id(cost.layers)], label="modelled")
        for id_, cost in table.devices.items()
    }
    return replace(table, layers=layers, devices=devices, tied=tied)


def _bytes(whole: LayerBytes, name: str, share: float, cut_nbytes: int) -> LayerBytes:
    """Return the bytes of a part. It saves as many bytes as the whole layer, mostly the input."""
    params_nbytes, state_nbytes = (
        round(share * nbytes) for nbytes in (whole.params_nbytes, whole.state_nbytes)
    )
    return LayerBytes(name, params_nbytes, state_nbytes, whole.saved_nbytes, cut_nbytes)


def _row(cost: DeviceCost, index: int, share: float) -> tuple[LayerCost, ...]:
    """Return the costs of a device's layers. Each part has the whole fixed overhead and a share of
    the remaining time."""
    whole, overhead_s = cost.layers[index], cost.overhead_s

    def part(share: float) -> LayerCost:
        if whole.impossible:
            return whole
        forward_s, backward_s, update_s = (
            min(time_s, overhead_s) + share * max(time_s - overhead_s, 0.0)
            for time_s in (whole.forward_s, whole.backward_s, whole.update_s)
        )
        return replace(whole, forward_s=forward_s, backward_s=backward_s, update_s=update_s)

    return (*cost.layers[:index], part(share), part(1 - share), *cost.layers[index + 1 :])
