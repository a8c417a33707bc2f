"""CostTable: what every layer costs on every device, and what every link costs. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hetpipe.errors import CostError

VERSION = 1


@dataclass(frozen=True)
class LayerCost:
    """A layer on one device, one micro-batch. Infinite seconds: the device cannot run it."""

    forward_s: float
    backward_s: float
    update_s: float  # optimizer, once per mini-batch
    reason: str = ""  # why the device cannot run it

    @property
    def impossible(self) -> bool:
        """Whether the device cannot run it."""
        return math.isinf(self.forward_s + self.backward_s)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer needs, on any device, one micro-batch."""

    name: str
    params_nbytes: int
    state_nbytes: int  # optimizer state
    saved_nbytes: int  # kept per micro-batch in flight
    cut_nbytes: int  # what crosses if the model is cut behind this layer, one way


@dataclass(frozen=True)
class DeviceCost:
    """One device's row of layers."""

    layers: tuple[LayerCost, ...]
    overhead_s: float  # what any compute action costs beyond its layers (already inside each layer)
    memory_nbytes: int
    memory_domain: str
    execution: str = "sync"  # sync | async: sends results whole, or while it makes them
    label: str = "measured"  # measured | emulated | modelled


@dataclass(frozen=True)
class LinkCost:
    """Time to move n bytes = latency_s + n / bandwidth_Bps."""

    latency_s: float
    bandwidth_Bps: float
    label: str = "measured"

    def time_s(self, nbytes: int) -> float:
        """Seconds for `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth_Bps


@dataclass(frozen=True)
class TiedBytes:
    """A parameter that several layers share: where they are apart, it travels once per step."""

    name: str
    nbytes: int
    layers: tuple[int, ...]  # indices


@dataclass(frozen=True)
class CostTable:
    """Costs at one micro-batch size. `links` is keyed by (from, to) device ids."""

    model: str
    samples: int
    layers: tuple[LayerBytes, ...]
    devices: dict[str, DeviceCost]
    links: dict[tuple[str, str], LinkCost] = field(default_factory=dict)
    step_overhead_s: float = 0.0  # controller's cost of one step: hand out the batch, gather losses
    tied: tuple[TiedBytes, ...] = ()

    def forward_s(self, device: str, lo: int, hi: int) -> float:
        """A stage of layers lo..hi (hi excluded): the fixed overhead counts once."""
        cost = self.devices[device]
        return _stage_s([layer.forward_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def backward_s(self, device: str, lo: int, hi: int) -> float:
        """Likewise for the backward."""
        cost = self.devices[device]
        return _stage_s([layer.backward_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def update_s(self, device: str, lo: int, hi: int) -> float:
        """Likewise for the optimizer."""
        cost = self.devices[device]
        return _stage_s([layer.update_s for layer in cost.layers[lo:hi]], cost.overhead_s)

    def link(self, source: str, target: str) -> LinkCost:
        """The link between two devices; free where source is target. Raises `CostError`."""
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
    def from_json(data: Mapping[str, Any]) -> CostTable:
        """The inverse of `to_json`. Raises `CostError` for another version or shape."""
        if data.get("version") != VERSION:
            found = data.get("version")
            raise CostError(f"cost table has version {found}, this hetpipe reads {VERSION}")
        fields = {key: value for key, value in data.items() if key != "version"}
        try:
            fields["layers"] = tuple(LayerBytes(**layer) for layer in data["layers"])
            fields["devices"] = {id: _device(entry) for id, entry in data["devices"].items()}
            fields["links"] = {
                (entry["source"], entry["target"]): LinkCost(
                    entry["latency_s"], _unpacked(entry["bandwidth_Bps"]), entry["label"]
                )
                for entry in data["links"]
            }
            fields["tied"] = tuple(
                TiedBytes(entry["name"], entry["nbytes"], tuple(entry["layers"]))
                for entry in data["tied"]
            )
            return CostTable(**fields)
        except (KeyError, TypeError, AttributeError) as error:
            raise CostError(f"not a cost table of version {VERSION}: {error!r}") from error


def _stage_s(times_s: list[float], overhead_s: float) -> float:
    if not times_s:
        return 0.0
    return overhead_s + sum(max(time_s - overhead_s, 0.0) for time_s in times_s)


def _device(entry: Mapping[str, Any]) -> DeviceCost:
    layers = tuple(
        LayerCost(
            _unpacked(layer["forward_s"]),
            _unpacked(layer["backward_s"]),
            _unpacked(layer["update_s"]),
            layer["reason"],
        )
        for layer in entry["layers"]
    )
    return DeviceCost(**{**entry, "layers": layers})


def _unpacked(number: float | None) -> float:
    """JSON has no infinity: `_pack` writes None."""
    return math.inf if number is None else number


def _pack(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return None
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value
