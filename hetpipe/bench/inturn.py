"""One training step of a model on one device, with one stage at a time in the device's memory.

First, each stage but the last runs its forward, and only the tensors at the next cut stay. Then,
from the last stage to the first, each stage is loaded and runs its forward and its backward. So all
forwards but the last stage's run twice. The device holds the data of one stage at a time.

The update of a stage is loaded separately, after the passes. So optimizer state and the passes'
data, such as packed weights, are never in memory at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.bench.machine import collecting_new, trim_memory
from hetpipe.capture.captured import Captured
from hetpipe.capture.program import GRAD, PARAM, StageGraphs
from hetpipe.errors import PlanError
from hetpipe.plan.partition import exact
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.wire.messages import Keep
from hetpipe.worker.single import Crossing, SingleStage
from hetpipe.worker.stage import Stage

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    See = Callable[[str, Array, Array | None], None]
    """Function that gets a parameter's name, gradient and new value (None without an update)."""
    Cross = Callable[[Crossing], Crossing]
    """Function from the tensors that leave a stage to the tensors that enter the next stage."""


def _as_they_are(crossing: Crossing) -> Crossing:
    return crossing


TRIM_NBYTES = 256 << 20
"""Bytes of finished stages between two trims of memory. A trim takes tenths of a second."""


def even_cuts(captured: Captured, samples: int, stages: int) -> tuple[int, ...]:
    """Return the cuts that minimise the parameter bytes of the largest stage.

    Raises `PlanError` for more stages than layers.
    """
    layers = captured.layer_graph(samples).layers
    if stages > len(layers):
        raise PlanError(
            f"{len(layers)} layers cannot make {stages} stages: ask for at most {len(layers)}"
        )
    before = np.cumsum([0, *(layer.params_nbytes for layer in layers)]).astype(float)
    costs = np.where(np.tri(len(before), dtype=bool), np.inf, before[None, :] - before[:, None])
    cuts = exact([costs] * stages)
    assert cuts is not None  # no cost of a stage with layers is infinite, so cuts exist
    return cuts


@dataclass
class StepInTurn:
    """A step of one micro-batch; call `run` once.

    `values` has the parameters and buffers, and `feed` the tensors of the batch, all by name.
    """

    device: Device
    graphs: Sequence[StageGraphs]
    samples: int
    values: Mapping[str, Array]
    feed: Mapping[str, Array]
    cross: Cross = _as_they_are
    """Function called with the activations at each cut, then with their gradients (tangents), from
    the last cut to the first. It returns the tensors that enter the next stage."""
    compile_s: float = 0.0
    """Seconds spent compiling and loading stages."""
    _left: int = 0
    """Bytes of the stages that have finished since the last trim of memory."""
    _scale: float = 1.0
    _loss: float = 0.0
    _shared: dict[str, Array] = field(default_factory=dict)
    """Sums of gradients of tied parameters, from the stages after the owner's stage."""

    def run(self, rates: Mapping[str, float], see: See) -> float:
        """Train the step and return its mean loss. `see` is called once for each parameter."""
        with collecting_new():
            return self._run(rates, see)

    def _run(self, rates: Mapping[str, float], see: See) -> float:
        entering: list[Crossing] = [{}]
        for graphs in self.graphs[:-1]:
            entering.append(self.cross(self._forward_only(graphs, entering[-1])))
            self._trim(graphs)
        tangents: Crossing = {}
        for graphs in reversed(self.graphs):
            tangents, held, gradients = self._passes(graphs, entering.pop(), tangents)
            self._trim(graphs)
            if entering:
                tangents = self.cross(tangents)
            self._update(graphs, held, gradients, rates, see)
            del held, gradients
            self._trim(graphs)
        return self._loss

    def _trim(self, graphs: StageGraphs) -> None:
        """Count a finished stage. After `TRIM_NBYTES`, trim memory of device and process."""
        programs = graphs.passes[self.samples].programs
        self._left += sum(slot.nbytes for p in programs for slot in (*p.inputs, *p.outputs))
        if self._left > TRIM_NBYTES:
            trim_memory()
            self.device.trim()
            self._left = 0

    def _forward_only(self, graphs: StageGraphs, entering: Crossing) -> Crossing:
        """Run a stage's forward and return the tensors for the next stage."""
        passes = replace(graphs.passes[self.samples], backward=None)
        single = self._load(replace(graphs, passes={self.samples: passes}, update=None))
        return single.forward(self.samples, self.feed, entering)

    def _passes(
        self, graphs: StageGraphs, entering: Crossing, arriving: Crossing
    ) -> tuple[Crossing, dict[tuple[str, str], Buffer], dict[str, Array]]:
        """Run forward and backward of a stage.

        Return the tangents for the previous stage; the parameters and gradients on the device; and
        the gradients on the host, by parameter.
        """
        single = self._load(replace(graphs, update=None))
        single.forward(self.samples, self.feed, entering)
        stage = single.stage
        if stage.has_loss:
            self._loss, self._scale = single.loss, single.grad_scale
        tangents = single.backward(self.samples, self.feed, arriving)
        backward = graphs.passes[self.samples].backward
        gradients = {
            slot.name: self._summed(stage, graphs, slot.name)
            for slot in (backward.outputs if backward else ())
            if slot.role == GRAD
        }
        held = stage.store.find_buffers(
            [(role, name) for role in (PARAM, GRAD) for name in gradients]
        )
        return tangents, held, gradients

    def _summed(self, stage: Stage, graphs: StageGraphs, name: str) -> Array:
        """Return a parameter's gradient; for a tied parameter, add later stages' gradients."""
        own = stage.get((GRAD, name))
        owners = {tied: owner for tied, owner, _ in graphs.tied}
        if name not in owners:
            return own
        own = self._shared[name] = own + self._shared.pop(name, 0.0)
        if owners[name] == graphs.stage:
            stage.put((GRAD, name), self._shared.pop(name))
        return own

    def _update(
        self,
        graphs: StageGraphs,
        held: Mapping[tuple[str, str], Buffer],
        gradients: dict[str, Array],
        rates: Mapping[str, float],
        see: See,
    ) -> None:
        """Apply the optimizer, if any, and call `see` for the parameters that the stage owns."""
        stage = None
        if graphs.update is not None:
            stage = self._load(replace(graphs, passes={}, tied=()), held).stage
            stage.update(rates, self._scale)
        owners = {tied: owner for tied, owner, _ in graphs.tied}
        while gradients:
            name, gradient = gradients.popitem()
            if owners.get(name, graphs.stage) == graphs.stage:
                updated = None if stage is None else stage.get((PARAM, name))
                see(name, gradient * self._scale, updated)

    def _load(
        self, graphs: StageGraphs, held: Mapping[tuple[str, str], Buffer] | None = None
    ) -> SingleStage:
        """Return a compiled stage with its values on the device."""
        begin_s = time.perf_counter()
        keep = Keep(updates=(0,) * len(self.graphs))
        single = SingleStage(self.device, graphs, self.values, keep, held)
        self.compile_s += time.perf_counter() - begin_s
        return single
