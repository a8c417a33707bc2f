"""StageCosts: time and memory of any consecutive layers on any device, from prefix sums.

A stage is always layers lo..hi (hi excluded), and cut c is between layers c-1 and c. No tensor
crosses cuts 0 and L, the ends of the model. lo, hi and c may be arrays.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

import numpy as np

from hetpipe.cost.table import CostTable, DeviceCost

Objective = Literal["sum", "max"]
"""How a stage's time counts its sends. `max`: the stage sends while it computes, so the longest of
the computation and its sends counts. `sum`: as `max` for an async device; but a sync device sends
after the computation, so its times are added (BaPipe's 1F1B-SNO)."""

Array = Any  # an index or a time, or a numpy array of indices or times


class StageCosts:
    """Prices stages of one cost table.

    With `recompute` a stage keeps only its input, and a backward first repeats the forward. So only
    one micro-batch at a time has all tensors that a forward saves.
    """

    def __init__(self, table: CostTable, recompute: bool = False) -> None:
        self.table = table
        self.recompute = recompute
        self.count = len(table.layers)
        self._copies = 1 + table.trains  # of a parameter or tensor: itself and its gradient
        weights = [
            self._copies * layer.params_nbytes + layer.state_nbytes for layer in table.layers
        ]
        self._weights = _prefix(weights)
        self._params = _prefix([layer.params_nbytes for layer in table.layers])
        self._saved = _prefix([layer.saved_nbytes for layer in table.layers])
        cuts = [layer.cut_nbytes for layer in table.layers]
        self._cuts = np.array([0, *cuts[:-1], 0 if table.trains else cuts[-1]], float)
        self._passes: dict[tuple[int, float], tuple[Array, Array, float]] = {}
        self._updates_s: dict[tuple[int, float], Array] = {}
        self.kinds_of = cache(self._kinds_of)
        self.alike = cache(self._alike)
        # Partitions share most stages, so the price of a stage is needed many times.
        self.stage_passes_s = cache(partial(table.passes_s, recompute=recompute))
        self.stage_compute_s = cache(lambda *span: float(self.compute_s(*span)))
        self.stage_memory_nbytes = cache(lambda *numbers: int(self.memory_nbytes(*numbers)))

    def gradient_nbytes(self, lo: Array, hi: Array) -> Array:
        """Return the bytes of a stage's gradients; a shared parameter counts once."""
        nbytes = self._params[hi] - self._params[lo] - self._repeated(lo, hi)
        return self.table.trains * nbytes

    def memory_nbytes(
        self,
        lo: Array,
        hi: Array,
        in_flight: int,
        versions: int = 1,
        share: float = 1.0,
        borrowed: int | None = None,
    ) -> Array:
        """Return the bytes of a stage: weights x versions, gradients, optimizer state, saved
        tensors x micro-batches in flight, and the buffers at the cuts.

        A parameter that layers of the stage share counts once. A cut has two buffers on each side:
        for the tensors that cross forward and for their gradients. `share` is a replica's share of
        a micro-batch. Of a parameter that an earlier stage owns there are `borrowed` versions
        (default: `versions`). Forwards alone have no gradients and one version.
        """
        if not self.table.trains:
            versions = borrowed = 1
        more = 0.0 if borrowed is None else (borrowed - versions) * self._borrowed(lo, hi)
        return (
            self._weights[hi]
            - self._weights[lo]
            - (self._copies - 1 + versions) * self._repeated(lo, hi)
            + (versions - 1) * (self._params[hi] - self._params[lo])
            + share * self._saved_nbytes(lo, hi, in_flight)
            + share * self._copies * (self._cuts[lo] + self._cuts[hi])
            + more
        )

    def additive_nbytes(self, in_flight: int, versions: int, share: float) -> tuple[Array, Array]:
        """Return `memory_nbytes` in two parts, by cut: prefix sums over the layers, and buffers.

        The two parts are the whole memory only without tied parameters and without `recompute`.
        """
        more = (versions - 1) * self._params if self.table.trains else 0.0
        sums = self._weights + more + share * in_flight * self._saved
        return sums, share * self._copies * self._cuts

    def _saved_nbytes(self, lo: Array, hi: Array, in_flight: int) -> Array:
        """Return the bytes kept for the backwards of the micro-batches in flight."""
        saved = self._saved[hi] - self._saved[lo]
        return saved + in_flight * self._cuts[lo] if self.recompute else in_flight * saved

    def _repeated(self, lo: Array, hi: Array) -> Array:
        """Return the bytes of parameters that a layer shares with an earlier layer of the stage."""
        if not self.table.tied:
            return 0.0
        nbytes = np.zeros(np.broadcast_shapes(np.shape(lo), np.shape(hi)))
        for shared in self.table.tied:
            layers = sorted(shared.layers)
            inside = np.searchsorted(layers, hi) - np.searchsorted(layers, lo)
            nbytes = nbytes + np.maximum(inside - 1, 0) * shared.nbytes
        return nbytes

    def _borrowed(self, lo: Array, hi: Array) -> Array:
        """Return the bytes of the parameters that the stage shares with an earlier stage."""
        nbytes = np.zeros(np.broadcast_shapes(np.shape(lo), np.shape(hi)))
        for shared in self.table.tied:
            layers = sorted(shared.layers)
            inside = np.searchsorted(layers, hi) > np.searchsorted(layers, lo)
            nbytes = nbytes + (inside & (layers[0] < lo)) * shared.nbytes
        return nbytes

    def _kinds_of(self, devices: tuple[str, ...]) -> tuple[int, ...]:
        """Return a number for each device; devices with equal times have equal numbers."""
        numbers: dict[tuple[int, float], int] = {}
        costs = map(self.table.devices.__getitem__, devices)
        # Equal devices share a tuple of layers.
        kinds = [(id(cost.layers), cost.overhead_s) for cost in costs]
        return tuple([numbers.setdefault(kind, len(numbers)) for kind in kinds])

    def _alike(self, devices: tuple[str, ...]) -> dict[str, int]:
        """Return the first device of each kind, with the number of devices of this kind."""
        kinds = self.kinds_of(devices)
        return {devices[kinds.index(kind)]: count for kind, count in Counter(kinds).items()}

    def prefixes(self, device: str) -> tuple[Array, Array, float]:
        """Return, by cut, the seconds of all layers before the cut without the fixed overhead, and
        how many of these layers the device cannot run; also return the overhead."""
        cost = self.table.devices[device]
        kind = id(cost.layers), cost.overhead_s  # devices of one kind share a tuple of layers
        if kind not in self._passes:
            self._passes[kind] = _passes(cost, 1 + self.recompute, self.table.trains)
        return self._passes[kind]

    def compute_s(self, device: str, lo: Array, hi: Array) -> Array:
        """Return a stage's seconds for a micro-batch; infinite if the device cannot run it."""
        seconds, unsupported, overhead_s = self.prefixes(device)
        able = unsupported[hi] == unsupported[lo]
        return np.where(able, overhead_s + seconds[hi] - seconds[lo], math.inf)

    def least_update_s(self, device: str, lo: Array, hi: Array) -> Array:
        """Return the seconds of a stage's update without the fixed overhead."""
        cost = self.table.devices[device]
        kind = id(cost.layers), cost.overhead_s
        if kind not in self._updates_s:
            seconds = [
                max(layer.update_s - cost.overhead_s, 0.0) if math.isfinite(layer.update_s) else 0.0
                for layer in cost.layers
            ]
            self._updates_s[kind] = _prefix(seconds)
        return self._updates_s[kind][hi] - self._updates_s[kind][lo]

    def transfer_s(self, source: str, target: str, cut: Array) -> Array:
        """Return the seconds of a transfer across a cut, in one direction."""
        link = self.table.link(source, target)
        return link.latency_s + self._cuts[cut] / link.bandwidth_Bps

    def gradient_s(self, source: str, target: str, cut: Array) -> Array:
        """Return the seconds of the gradients across a cut; 0 for a model that only predicts."""
        return self.table.trains * self.transfer_s(source, target, cut)

    def stage_s(
        self, devices: Sequence[str], stage: int, lo: Array, hi: Array, objective: Objective
    ) -> Array:
        """Return the seconds for which a micro-batch occupies the stage. Its sends, to the next and
        to the previous stage, count by `objective`."""
        device = devices[stage]
        compute_s = self.compute_s(device, lo, hi)
        sends_s = []
        if stage + 1 < len(devices):
            sends_s.append(self.transfer_s(device, devices[stage + 1], hi))
        if stage > 0:
            sends_s.append(self.gradient_s(device, devices[stage - 1], lo))
        if objective == "sum" and self.table.devices[device].execution == "sync":
            return compute_s + sum(sends_s)
        for send_s in sends_s:
            compute_s = np.maximum(compute_s, send_s)
        return compute_s

    def matrix(
        self,
        devices: Sequence[str],
        stage: int,
        in_flight: int,
        objective: Objective,
        bounded: bool = True,
        versions: int = 1,
    ) -> Array:
        """Return `stage_s` for all [lo, hi]; infinite for an empty stage and, if `bounded`, for a
        stage that exceeds the device's memory."""
        lo, hi = np.ogrid[: self.count + 1, : self.count + 1]
        capacity = self.table.devices[devices[stage]].memory_nbytes if bounded else math.inf
        fits = (lo < hi) & (self.memory_nbytes(lo, hi, in_flight, versions) <= capacity)
        return np.where(fits, self.stage_s(devices, stage, lo, hi, objective), math.inf)


def _passes(cost: DeviceCost, forwards: int, backwards: int) -> tuple[Array, Array, float]:
    """Return the result of `prefixes` for these numbers of passes."""
    seconds, unsupported = [], []
    for layer in cost.layers:
        times_s = (*(layer.forward_s,) * forwards, *(layer.backward_s,) * backwards)
        unsupported.append(math.isinf(sum(times_s)))
        own_s = sum(max(time_s - cost.overhead_s, 0.0) for time_s in times_s)
        seconds.append(0.0 if unsupported[-1] else own_s)
    return _prefix(seconds), _prefix(unsupported), (forwards + backwards) * cost.overhead_s


def _prefix(values: Sequence[float]) -> Array:
    return np.concatenate(([0.0], np.cumsum(np.array(values, float))))
