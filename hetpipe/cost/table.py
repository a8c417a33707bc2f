"""CostTable: the costs of every layer on every device, and of every link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise, starmap
from operator import attrgetter
from typing import Annotated, Any

from hetpipe.cost.earlier_tables import upgraded
from hetpipe.cost.loss import Label, LossCost
from hetpipe.cost.probe import Drift, Probe, Relative
from hetpipe.errors import CostError
from hetpipe.html import table_html
from hetpipe.records import Count, Entries, NullIsInfinite, Number, OneOf, Positive, Seconds, Source
from hetpipe.words import format_nbytes, format_s, short, words

VERSION = 3
LONGEST_ID = 1000  # longest device id in letters, so that messages stay short

Factor = Annotated[float, Number(most=1.0, above=True)]
Ratio = Annotated[float, Number(above=True)]
Share = Annotated[float, Number(most=1.0)]
MaybeSeconds = Annotated[float, Number(most=1e9), NullIsInfinite()]
Bandwidth = Annotated[float, Number(above=True), NullIsInfinite()]
Execution = Annotated[str, OneOf(("sync", "async"))]


@dataclass(frozen=True)
class LayerCost:
    """A layer's cost on a device, for one micro-batch; infinite if the device cannot run it."""

    forward_s: MaybeSeconds
    backward_s: MaybeSeconds
    update_s: MaybeSeconds  # the optimizer, once per mini-batch
    reason: str = ""  # why the device cannot run the layer
    spread: Relative = 0.0  # of forward + backward: half the quartiles' distance, over the median

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "reason" and not value >= 0.0:  # NaN fails as well
                raise CostError(f"a layer's {name} is {value}; give 0 or more")

    def scaled(self, factor: float) -> LayerCost:
        """Return the cost with all times multiplied."""
        return self._changed(lambda time_s: factor * time_s)

    def delayed(self, seconds: float) -> LayerCost:
        """Return the cost with `seconds` added to each pass and update whose time is above 0."""
        return self._changed(lambda time_s: time_s + seconds * (time_s > 0))

    def _changed(self, change: Callable[[float], float]) -> LayerCost:
        forward_s, backward_s = change(self.forward_s), change(self.backward_s)
        return replace(
            self, forward_s=forward_s, backward_s=backward_s, update_s=change(self.update_s)
        )

    def __str__(self) -> str:
        return self.reason or f"{format_s(self.forward_s)} + {format_s(self.backward_s)}"

    @property
    def impossible(self) -> bool:
        """Whether the device cannot run the layer."""
        return math.isinf(self.forward_s + self.backward_s)


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of a layer for one micro-batch, on any device."""

    name: str
    params_nbytes: Count
    state_nbytes: Count  # optimizer state
    saved_nbytes: Count  # kept for each micro-batch in flight
    cut_nbytes: Count  # cross a cut after this layer, in one direction


@dataclass(frozen=True)
class DeviceCost:
    """The costs of all layers on one device, measured while all devices of the table computed.

    `spread` is the relative spread of the whole model's time, as in `LayerCost`. `alone` is the
    model's time while the other devices are idle, over its time while they compute.
    """

    layers: tuple[LayerCost, ...]
    overhead_s: Seconds  # fixed part of any compute action; each layer's times include it
    memory_nbytes: Count
    memory_domain: str
    execution: Execution = "sync"  # sync: sends complete results; async: parts while it computes
    label: Label = "measured"
    spread: Relative = 0.0
    alone: Factor = 1.0
    probe: Probe | None = None  # from the measurement, while all other devices computed
    probe_alone: Probe | None = None  # while all other devices were idle

    def drifted(self, drift: Drift) -> DeviceCost:
        """Return costs and probes after a drift. Raises `CostError` for an impossible factor."""
        if not 0.0 < drift.factor < math.inf:
            raise CostError(f"a drift of {drift.factor}: it must be above 0, finite; probe again")
        ratios = (drift.arithmetic, drift.memory)
        return replace(
            self._times(drift.factor),
            spread=math.hypot(self.spread, drift.spread),
            probe=self.probe and self.probe.scaled(*ratios),
            probe_alone=self.probe_alone and self.probe_alone.scaled(*ratios),
        )

    def beside(self, share: float) -> DeviceCost:
        """Return the costs while this share of the other devices computes."""
        alone = self.probe_alone
        probe = alone.towards(self.probe, share) if alone and self.probe else self.probe
        times = self._times(self.alone + share * (1 - self.alone))
        return replace(times, alone=1.0, probe=probe, probe_alone=None)

    def _times(self, factor: float) -> DeviceCost:
        if factor == 1.0:
            return self
        layers = tuple(layer.scaled(factor) for layer in self.layers)
        return replace(self, layers=layers, overhead_s=factor * self.overhead_s)


@dataclass(frozen=True)
class LinkCost:
    """A link between two devices: a message of n bytes takes latency_s + n / bandwidth_Bps."""

    latency_s: Seconds
    bandwidth_Bps: Bandwidth
    label: Label = "measured"
    sum_speed: Ratio = 1.0  # bandwidth of sums over replicas, over the bandwidth of messages
    copying: Share = 0.5  # of a message's time, in which each end's cores copy it
    media: tuple[str, ...] = ()  # shared with other links, such as "a up", what host a sends

    @property
    def sum_Bps(self) -> float:
        """The bandwidth of sums over replicas, in bytes per second."""
        return self.sum_speed * self.bandwidth_Bps

    def time_s(self, nbytes: int) -> float:
        """Return the seconds of a message of `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth_Bps


@dataclass(frozen=True)
class TiedBytes:
    """A parameter that several layers share. It travels once per step between their stages."""

    name: str
    nbytes: Count
    layers: Annotated[tuple[Count, ...], Entries(2)]  # indices of these layers


@dataclass(frozen=True)
class CostTable:
    """The costs at one micro-batch size. The keys of `links` are (source, target) device ids."""

    model: str
    samples: int
    layers: tuple[LayerBytes, ...]
    devices: dict[str, DeviceCost]
    links: Mapping[tuple[str, str], LinkCost] = field(default_factory=dict)
    step_overhead_s: float = 0.0  # seconds to hand out the mini-batch and to gather the losses
    tied: tuple[TiedBytes, ...] = ()
    contention: float = 0.0  # share of the cores that other work used; 0 if it was small
    trains: bool = True  # whether parameters have gradients, as large as the parameters
    whole_loss: dict[str, LossCost] = field(default_factory=dict)
    """The loss over a whole mini-batch, by the device of the last stage; empty: there is none."""

    def forward_s(self, device: str, lo: int, hi: int) -> float:
        """Return the seconds of the forward of layers lo..hi-1; the fixed overhead counts once."""
        return self._stage_s("forward_s", device, lo, hi)

    def backward_s(self, device: str, lo: int, hi: int) -> float:
        """Return the seconds of a stage's backward; 0 for a model that only predicts."""
        return self._stage_s("backward_s", device, lo, hi) if self.trains else 0.0

    def update_s(self, device: str, lo: int, hi: int) -> float:
        """Return the seconds of a stage's update; 0 for a model that only predicts."""
        return self._stage_s("update_s", device, lo, hi) if self.trains else 0.0

    def _stage_s(self, part: str, device: str, lo: int, hi: int) -> float:
        layers, overhead_s = self.devices[device].layers[lo:hi], self.devices[device].overhead_s
        times_s = map(attrgetter(part), layers)
        own_s = sum([time_s - overhead_s for time_s in times_s if time_s > overhead_s])
        return overhead_s + own_s if layers else 0.0

    def passes_s(
        self, device: str, lo: int, hi: int, recompute: bool = False
    ) -> tuple[float, float, float]:
        """Return the seconds of a stage's forward, backward and update; with `recompute` the
        backward repeats the forward."""
        forward_s, backward_s = self.forward_s(device, lo, hi), self.backward_s(device, lo, hi)
        return forward_s, backward_s + recompute * forward_s, self.update_s(device, lo, hi)

    def link(self, source: str, target: str) -> LinkCost:
        """Return the link between two devices; from a device to itself it is free. Raises
        `CostError`."""
        if source == target:
            return LinkCost(0.0, math.inf)
        if (source, target) not in self.links:
            raise CostError(f"no cost for the link {source} -> {target}; measure or describe it")
        return self.links[source, target]

    @cached_property
    def _chains(self) -> dict[tuple[str, ...], Set[LinkCost]]:
        return {}

    def chain(self, devices: tuple[str, ...]) -> Set[LinkCost]:
        """Return the different links between neighbours in a sequence of devices."""
        if devices not in self._chains:
            self._chains[devices] = frozenset(starmap(self.link, pairwise(devices)))
        return self._chains[devices]

    def drifted(self, drifts: Mapping[str, Drift]) -> CostTable:
        """Return the table corrected for the drifts of devices since it was measured."""
        devices = {
            id: cost.drifted(drifts[id]) if id in drifts else cost
            for id, cost in self.devices.items()
        }
        return replace(self, devices=devices)

    def beside(self, count: int) -> CostTable:
        """Return the costs while only `count` devices of the table compute.

        Fewer devices then share memory and cores. The times are assumed to grow linearly with
        `count`, from one device alone to all devices together.
        """
        together = len(self.devices)
        costs = self.devices.values()
        if count >= together or all(c.alone == 1.0 and c.probe_alone is None for c in costs):
            return self
        share = max(count - 1, 0) / (together - 1)
        devices = {id: cost.beside(share) for id, cost in self.devices.items()}
        return replace(self, devices=devices)

    def _repr_html_(self) -> str:
        heads = [f"{id}, {device.label}" for id, device in self.devices.items()]
        columns = ("layer", *heads, "weights", "saved", "cut")
        rows = [
            (
                layer.name,
                *(str(device.layers[index]) for device in self.devices.values()),
                *map(format_nbytes, (layer.params_nbytes, layer.saved_nbytes, layer.cut_nbytes)),
            )
            for index, layer in enumerate(self.layers)
        ]
        title = f"{self.model}: forward + backward, micro-batches of {self.samples}"
        return table_html(title, columns, rows, columns[1:])

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write: infinite numbers become None, links a list."""
        data = asdict(self) | {"version": VERSION}
        if not self.contention:
            del data["contention"]
        if self.trains:
            del data["trains"]
        if not self.whole_loss:
            del data["whole_loss"]
        data["links"] = [
            {"source": source, "target": target, **asdict(link)}
            for (source, target), link in self.links.items()
        ]
        packed: dict[str, Any] = _pack(data)
        return packed

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "") -> CostTable:
        """Return the table of a dict from `to_json`; `where` is its file.

        Raises `CostError` for an unknown version, and for a wrong entry, with its place.
        """
        source = Source("the cost table", CostError, where)
        table = source.versioned(_Table, upgraded(data, VERSION), VERSION)
        _check_references(table, source)
        links = {
            (e.source, e.target): LinkCost(*(getattr(e, each.name) for each in fields(LinkCost)))
            for e in table.links
        }
        return CostTable(**{**vars(table), "links": links})


@dataclass(frozen=True)
class _Link:
    """An entry of `links` in JSON."""

    source: str
    target: str
    latency_s: Seconds
    bandwidth_Bps: Bandwidth
    label: Label
    sum_speed: Ratio
    copying: Share
    media: tuple[str, ...]


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
    contention: Annotated[float, Number(most=1.0)]
    trains: bool
    whole_loss: dict[str, LossCost]


def _check_references(table: _Table, source: Source) -> None:
    """Raise `CostError` if parts of the table contradict each other, or an id is too long."""
    count = len(table.layers)
    for id, device in table.devices.items():
        if len(id) > LONGEST_ID:
            why = f"has {short(id)}, of {len(id)} letters; an id has at most {LONGEST_ID}"
            raise source.fault(("devices",), why)
        if len(device.layers) != count:
            why = f"has {len(device.layers)} entries, the model {count} layers: give one per layer"
            raise source.fault(("devices", id, "layers"), why)
    if table.whole_loss and table.whole_loss.keys() != table.devices.keys():
        why = f"has {words(table.whole_loss)}, the table {words(table.devices)}: give all or none"
        raise source.fault(("whole_loss",), why)
    pairs = [(link.source, link.target) for link in table.links]
    for index, pair in enumerate(pairs):
        absent = [id for id in pair if id not in table.devices]
        if absent:
            why = f"names {short(absent[0])}; the table has {words(table.devices)}"
            raise source.fault(("links", index), why)
        if pair in pairs[:index]:
            why = f"is a second link from {pair[0]} to {pair[1]}"
            raise source.fault(("links", index), why)
    for index, shared in enumerate(table.tied):
        if max(shared.layers) >= count:
            why = f"names layer {max(shared.layers)}, but the last layer is {count - 1}"
            raise source.fault(("tied", index, "layers"), why)


def _pack(value: Any) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return None
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    return value
