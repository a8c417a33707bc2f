"""CostTable: what every layer costs on every device, and what every link costs. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerCost:
    """A layer on one device, one micro-batch. Infinite seconds: the device cannot run it."""

    forward_s: float
    backward_s: float
    update_s: float  # optimizer, once per mini-batch
    reason: str = ""  # why the device cannot run it


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
    execution: str = "sync"  # sync | async
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
class CostTable:
    """Costs at one micro-batch size. `links` is keyed by (from, to) device ids."""

    model: str
    samples: int
    layers: tuple[LayerBytes, ...]
    devices: dict[str, DeviceCost]
    links: dict[tuple[str, str], LinkCost] = field(default_factory=dict)
    step_overhead_s: float = 0.0  # controller's cost of one step: hand out the batch, gather losses

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
        """The link between two devices; free where source is target."""
        if source == target:
            return LinkCost(0.0, float("inf"))
        return self.links[source, target]


def _stage_s(times_s: list[float], overhead_s: float) -> float:
    if not times_s:
        return 0.0
    return overhead_s + sum(max(time_s - overhead_s, 0.0) for time_s in times_s)
