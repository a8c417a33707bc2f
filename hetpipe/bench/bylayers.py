"""A step that compares each layer alone, so that layers do not amplify earlier rounding errors.

Every layer is a stage. The programs first run in float64, and the tensors at each cut are saved to
a file. These are the judge's tensors. Then the programs run on the device. The tensors that leave a
layer are compared with the judge's. The next layer gets the judge's tensors, rounded to float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hetpipe.bench.filed import Filed
from hetpipe.bench.inturn import StepInTurn
from hetpipe.bench.judge import Distance
from hetpipe.bench.machine import trim_memory
from hetpipe.capture.program import StageGraphs
from hetpipe.check.device import ExactDevice
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.wire.wire import host_dtype

if TYPE_CHECKING:
    from hetpipe.bench.inturn import See
    from hetpipe.worker.single import Crossing

    Array = np.ndarray[Any, Any]


class StepByLayers:
    """A step in which each layer gets the judge's tensors as inputs.

    `graphs` has a stage for every layer; for `values` and `feed` see `StepInTurn`. The constructor
    runs the programs in float64, and `see` gets the gradients of that run.
    """

    def __init__(
        self,
        graphs: Sequence[StageGraphs],
        samples: int,
        values: Mapping[str, Array],
        feed: Mapping[str, Array],
        rates: Mapping[str, float],
        see: See,
    ) -> None:
        self._step = partial(StepInTurn, samples=samples, values=values, feed=feed)
        self._graphs, self._rates = graphs, rates
        self._filed = Filed()
        self._keys: list[dict[str, str]] = []  # keys in the file, by cut and name
        keep = _Keep(self._filed, self._keys)
        passes = [replace(stage, update=None) for stage in graphs]
        self._step(ExactDevice(), passes, cross=keep.cross).run(rates, see)
        trim_memory()

    def run(self, device: Device, see: See) -> tuple[float, dict[str, float]]:
        """Run the step on a device; return its loss and the errors of tensors that leave layers.

        Errors are relative, by norms. `see` is called once for each parameter.
        """
        swap = _Swap(self._filed, self._keys)
        loss = self._step(device, self._graphs, cross=swap.cross).run(self._rates, see)
        return loss, swap.errors


class _Keep:
    """Saves the judge's tensors at the cuts to a file, in the order of the passes.

    A tensor that only passes through a layer is the same buffer at both cuts, and is saved once.
    """

    def __init__(self, filed: Filed, keys: list[dict[str, str]]) -> None:
        self._filed, self._keys = filed, keys
        self._last: Crossing = {}

    def cross(self, crossing: Crossing) -> Crossing:
        """Save the tensors of a cut, and return them unchanged."""
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


class _Swap:
    """Compares a device's tensors with the judge's, and replaces them by the judge's.

    A tensor that only passes through a layer is compared and uploaded once.
    """

    def __init__(self, filed: Filed, keys: Sequence[Mapping[str, str]]) -> None:
        self.errors: dict[str, float] = {}
        self._filed = filed
        self._keys = iter(keys)
        self._entering: Crossing = {}  # the device's tensors of the previous cut

    def cross(self, crossing: Crossing) -> Crossing:
        """Compare the tensors of a cut, and return the judge's tensors on the device."""
        keys = next(self._keys)
        new = {name: b for name, b in crossing.items() if self._entering.get(name) is not b}
        right = {name: self._filed[keys[name]] for name in new}
        distance = Distance({name: tensor.double() for name, tensor in right.items()})
        for name, buffer in new.items():
            self.errors[keys[name]] = distance.of(name, _on_host(buffer).double())
        uploaded = {name: _like(new[name], tensor) for name, tensor in right.items()}
        self._entering = {name: uploaded.get(name, buffer) for name, buffer in crossing.items()}
        return self._entering


def _on_host(buffer: Buffer) -> torch.Tensor:
    array = np.empty(buffer.shape, host_dtype(buffer.dtype))
    buffer.device.download(buffer, array).wait()
    return torch.from_numpy(array)


def _like(buffer: Buffer, tensor: torch.Tensor) -> Buffer:
    """Upload a tensor to the device of a buffer."""
    uploaded, event = buffer.device.upload(tensor.numpy())
    event.wait()
    return uploaded
