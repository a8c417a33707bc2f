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
    loss = StepInTurn(device, graphs, samples, values, feed, crossings.swap).run(lr, see)
    return loss, crossings.error


class _Crossings:
    """The judge's tensors at the cuts, in the order of the passes."""

    def __init__(self) -> None:
        self.error = 0.0
        self._filed = Filed()
        self._kept = self._swapped = 0

    def keep(self, crossing: Crossing) -> Crossing:
        """File the judge's tensors."""
        for name, buffer in crossing.items():
            self._filed.file(f"{self._kept} {name}", _on_host(buffer))
        self._kept += 1
        return crossing

    def swap(self, crossing: Crossing) -> Crossing:
        """The judge's tensors, with which those of a device are compared."""
        right = {name: self._filed[f"{self._swapped} {name}"] for name in crossing}
        self._swapped += 1
        distance = Distance({name: tensor.double() for name, tensor in right.items()})
        for name, buffer in crossing.items():
            self.error = max(self.error, distance.of(name, _on_host(buffer).double()))
        return {name: _like(crossing[name], tensor) for name, tensor in right.items()}


def _on_host(buffer: Buffer) -> torch.Tensor:
    array = np.empty(buffer.shape, host_dtype(buffer.dtype))
    buffer.device.download(buffer, array).wait()
    return torch.from_numpy(array)


def _like(buffer: Buffer, tensor: torch.Tensor) -> Buffer:
    """A tensor on the device of a buffer."""
    uploaded, event = buffer.device.upload(tensor.numpy())
    event.wait()
    return uploaded
