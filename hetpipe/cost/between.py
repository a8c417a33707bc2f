"""Interpolates the costs at a micro-batch size from the costs at two measured sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from hetpipe.cost.table import CostTable, LayerBytes, LayerCost
from hetpipe.errors import CostError


def with_sizes_between(
    tables: Mapping[int, CostTable], sizes: Sequence[int]
) -> dict[int, CostTable]:
    """Return the measured tables, and interpolated tables for all `sizes` between two of them."""
    modelled = {
        size: _between(tables[low], tables[high], size)
        for low, high in pairwise(sorted(tables))
        for size in sizes
        if low < size < high
    }
    return {**tables, **modelled}


def at_size(tables: Mapping[int, CostTable], samples: int) -> CostTable:
    """Return the costs at any size: measured, interpolated, or extrapolated from the nearest two.

    Raises `CostError` if only one size was measured, and `samples` is another.
    """
    if samples in tables:
        return tables[samples]
    sizes = sorted(tables)
    if len(sizes) == 1:
        raise CostError(
            f"costs are known only for micro-batches of {sizes[0]} samples, not of {samples}: "
            "profile another size, because a line through the costs needs two"
        )
    above = next((place for place, size in enumerate(sizes) if size > samples), len(sizes) - 1)
    low, high = sizes[max(above - 1, 0)], sizes[max(above, 1)]
    return _between(tables[low], tables[high], samples)


def _between(low: CostTable, high: CostTable, samples: int) -> CostTable:
    """Interpolate between two tables: times and bytes grow linearly with the samples."""
    share = (samples - low.samples) / (high.samples - low.samples)
    kinds: dict[tuple[int, int], tuple[LayerCost, ...]] = {}  # equal devices share a tuple
    devices = {}
    for member, cost in low.devices.items():
        other = high.devices[member]
        kind = id(cost.layers), id(other.layers)
        if kind not in kinds:
            pairs = zip(cost.layers, other.layers, strict=True)
            kinds[kind] = tuple(_layer(*pair, share) for pair in pairs)
        overhead_s = _mean(cost.overhead_s, other.overhead_s, share)
        devices[member] = replace(cost, layers=kinds[kind], overhead_s=overhead_s, label="modelled")
    layers = tuple(_bytes(*pair, share) for pair in zip(low.layers, high.layers, strict=True))
    return replace(low, samples=samples, layers=layers, devices=devices)


def _layer(low: LayerCost, high: LayerCost, share: float) -> LayerCost:
    if low.impossible:
        return low
    return replace(
        low,
        forward_s=_mean(low.forward_s, high.forward_s, share),
        backward_s=_mean(low.backward_s, high.backward_s, share),
        update_s=_mean(low.update_s, high.update_s, share),
    )


def _bytes(low: LayerBytes, high: LayerBytes, share: float) -> LayerBytes:
    return replace(
        low,
        saved_nbytes=round(_mean(low.saved_nbytes, high.saved_nbytes, share)),
        cut_nbytes=round(_mean(low.cut_nbytes, high.cut_nbytes, share)),
    )


def _mean(low: float, high: float, share: float) -> float:
    return low + share * (high - low)
