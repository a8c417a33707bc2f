"""A step in which each layer is compared on its own, so that none amplifies the others' rounding.

Every layer is a stage. Their programs run first in float64, and what crosses each cut is filed.
Then they run on the device: what leaves a layer is compared, and the next one is fed with the
judge's tensors in its place, rounded to float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetpipe.bench.exact import ExactDevice
from hetpipe.bench.filed import Filed
from hetpipe.bench.inturn import StepInTurn
from hetpipe.bench.judge import Distance
from hetpipe.bench.machine import trim_memory
from hetpipe.capture.program import StageGraphs
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.wire.wire import host_dtype

if TYPE_CHECKING:
    from hetpipe.bench.inturn import Crossing, See

    Array = np.ndarray[Any, Any]


def step_by_layers(
    device: Device,
    graphs: Sequence[StageGraphs],
    samples: int,
    values: Mapping[str, Array],
    feed: Mapping[str, Array],
    lr: float,
    see: See,
) -> tuple[float, float]:
    """The loss, and the largest relative error of a tensor that leaves a layer, by norms.

    `graphs` has a stage for every layer; `values`, `feed` and `see` are those of `StepInTurn`.
    """
    crossings = _Crossings()
    passes = [replace(stage, update=None) for stage in graphs]
    StepInTurn(ExactDevice(), passes, samples, values, feed, crossings.keep).run(lr, see)
    trim_memory()
    loss = StepInTurn(device, graphs, samples, values, feed, crossings.swap).run(lr, see)
    return loss, crossings.error


class _Crossings:
    """The judge's tensors at the cuts, in the order of the passes.

    A tensor that only passes by is the same buffer at the next cut: it is filed, compared and
    uploaded once.
    """

    def __init__(self) -> None:
        self.error = 0.0
        self._filed = Filed()
        self._keys: list[dict[str, str]] = []  # by cut and name
        self._last: Crossing = {}  # of the judge
        self._entering: Crossing = {}  # the last ones on the device
        self._swapped = 0

    def keep(self, crossing: Crossing) -> Crossing:
        """File the judge's tensors."""
        last = self._keys[-1] if self._keys else {}
        self._keys.append({})
        for name, buffer in crossing.items():
            if self._last.get(name) is buffer:
                self._keys[-1][name] = last[name]
            else:
                self._keys[-1][name] = key = str(len(self._filed))
                self._filed.file(key, _on_host(buffer))
        self._last = crossing
        return crossing

    def swap(self, crossing: Crossing) -> Crossing:
        """The judge's tensors, with which those of a device are compared."""
        keys = self._keys[self._swapped]
        self._swapped += 1
        new = {name: b for name, b in crossing.items() if self._entering.get(name) is not b}
        right = {name: self._filed[keys[name]] for name in new}
        distance = Distance({name: tensor.double() for name, tensor in right.items()})
        for name, buffer in new.items():
            self.error = max(self.error, distance.of(name, _on_host(buffer).double()))
        uploaded = {name: _like(new[name], tensor) for name, tensor in right.items()}
        self._entering = {name: uploaded.get(name, buffer) for name, buffer in crossing.items()}
        return self._entering


def _on_host(buffer: Buffer) -> torch.Tensor:
    array = np.empty(buffer.shape, host_dtype(buffer.dtype))
    buffer.device.download(buffer, array).wait()
    return torch.from_numpy(array)


def _like(buffer: Buffer, tensor: torch.Tensor) -> Buffer:
    """A tensor on the device of a buffer."""
    uploaded, event = buffer.device.upload(tensor.numpy())
    event.wait()
    return uploaded
