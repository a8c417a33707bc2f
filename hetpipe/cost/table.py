"""CostTable: the costs of every layer on every device, and of every link. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from hetpipe.errors import CostError
from hetpipe.records import (
    Count,
    Entries,
    NullIsInfinite,
    Number,
    OneOf,
    Positive,
    Seconds,
    Source,
)

VERSION = 1

MaybeSeconds = Annotated[float, Number(most=1e9), NullIsInfinite()]
Bandwidth = Annotated[float, Number(above=True), NullIsInfinite()]
Execution = Annotated[str, OneOf(("sync", "async"))]
Label = Annotated[str, OneOf(("measured", "emulated", "modelled"))]


@dataclass(frozen=True)
class LayerCost:
    """A layer on one device, one micro-batch. Infinite seconds: the device cannot run it."""

    forward_s: MaybeSeconds
    backward_s: MaybeSeconds
    update_s: MaybeSeconds  # optimizer, once per mini-batch
    reason: str = ""  # why the device cannot run it

    @property
    def impossible(self) -> bool:
        """Whether the device cannot run it."""
        return math.isinf(self.forward_s + self.backward_s)


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of a layer for one micro-batch, on any device."""

    name: str
    params_nbytes: Count
    state_nbytes: Count  # optimizer state
    saved_nbytes: Count  # kept per micro-batch in flight
    cut_nbytes: Count  # one way across a cut after this layer


@dataclass(frozen=True)
class DeviceCost:
    """One device's row of layers."""

    layers: tuple[LayerCost, ...]
    overhead_s: Seconds  # of any compute action; each layer's times include it
    memory_nbytes: Count
    memory_domain: str
    execution: Execution = "sync"  # sync: sends results whole; async: while it makes them
    label: Label = "measured"


@dataclass(frozen=True)
class LinkCost:
    """Time to move n bytes = latency_s + n / bandwidth_Bps."""

    latency_s: Seconds
    bandwidth_Bps: Bandwidth
    label: Label = "measured"

    def time_s(self, nbytes: int) -> float:
        """Seconds for `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth_Bps


@dataclass(frozen=True)
class TiedBytes:
    """A parameter that several layers share. It travels once per step if stages part them."""

    name: str
    nbytes: Count
    layers: Annotated[tuple[Count, ...], Entries(2)]  # indices


@dataclass(frozen=True)
class CostTable:
    """Costs at one micro-batch size. `links` is keyed by (from, to) device ids."""

    model: str
    samples: int
    layers: tuple[LayerBytes, ...]
    devices: dict[str, DeviceCost]
    links: dict[tuple[str, str], LinkCost] = field(default_factory=dict)
    step_overhead_s: float = 0.0  # the controller hands out the batch and gathers losses
    tied: tuple[TiedBytes, ...] = ()

    def forward_s(self, device: str, lo: int, hi: int) -> float:
        """Seconds of the forward of layers lo..hi (hi excluded); the fixed overhead counts once."""
        cost = self.devices[device]
        return _stage_s([layer.forward_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def backward_s(self, device: str, lo: int, hi: int) -> float:
        """Seconds of a stage's backward."""
        cost = self.devices[device]
        return _stage_s([layer.backward_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def update_s(self, device: str, lo: int, hi: int) -> float:
        """Seconds of a stage's update."""
        cost = self.devices[device]
        return _stage_s([layer.update_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def link(self, source: str, target: str) -> LinkCost:
        """The link between two devices; free if they are the same. Raises `CostError`."""
        if source == target:
            return LinkCost(0.0, math.inf)
        if (source, target) not in self.links:
            raise CostError(f"no cost for the link {source} -> {target}; measure or describe it")
        return self.links[source, target]

    def to_json(self) -> dict[str, Any]:
        """A dict that `json` can write: infinite numbers become None, links a list."""
        data = asdict(self) | {"version": VERSION}
        data["links"] = [
            {"source": source, "target": target, **asdict(link)}
            for (source, target), link in self.links.items()
        ]
        packed: dict[str, Any] = _pack(data)
        return packed

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "") -> CostTable:
        """The inverse of `to_json`; `where` is the file.

        Raises `CostError` for another version, and for a wrong entry, with its place.
        """
        source = Source("the cost table", CostError, where)
        table = source.versioned(_Table, data, VERSION)
        _check_references(table, source)
        return CostTable(
            table.model,
            table.samples,
            table.layers,
            table.devices,
            {(e.source, e.target): LinkCost(e.latency_s, e.bandwidth_Bps, e.label)
             for e in table.links},
            table.step_overhead_s,
            table.tied,
        )  # fmt: skip


@dataclass(frozen=True)
class _Link:
    """An entry of `links` in JSON."""

    source: str
    target: str
    latency_s: Seconds
    bandwidth_Bps: Bandwidth
    label: Label


@dataclass(frozen=True)
class _Table:
    """A cost table in JSON."""

    model: str
    samples: Positive
    layers: Annotated[tuple[LayerBytes, ...], Entries(1)]
    devices: Annotated[dict[str, DeviceCost], Entries(1)]
    links: tuple[_Link, ...]
    step_overhead_s: Seconds
    tied: tuple[TiedBytes, ...]


def _check_references(table: _Table, source: Source) -> None:
    """Raises `CostError` where a part names a device or layer that the table lacks."""
    count = len(table.layers)
    for id, device in table.devices.items():
        if len(device.layers) != count:
            why = f"has {len(device.layers)} entries, the model has {count} layers: give one each"
            raise source.fault(("devices", id, "layers"), why)
    pairs = [(link.source, link.target) for link in table.links]
    for index, pair in enumerate(pairs):
        absent = [id for id in pair if id not in table.devices]
        if absent:
            why = f"names {absent[0]!r}; the table has {', '.join(table.devices)}"
            raise source.fault(("links", index), why)
        if pair in pairs[:index]:
            why = f"is a second one from {pair[0]} to {pair[1]}"
            raise source.fault(("links", index), why)
    for index, shared in enumerate(table.tied):
        if max(shared.layers) >= count:
            why = f"names layer {max(shared.layers)}, the last is {count - 1}"
            raise source.fault(("tied", index, "layers"), why)


def _stage_s(times_s: list[float], overhead_s: float) -> float:
    if not times_s:
        return 0.0
    return overhead_s + sum(max(time_s - overhead_s, 0.0) for time_s in times_s)


def _pack(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return None
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value
