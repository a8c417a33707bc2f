"""A step in which each layer is compared on its own, so that none amplifies the others' rounding.

Every layer is a stage. Their programs run first in float64, and what crosses each cut is filed.
Then they run on the device: what leaves a layer is compared, and the next one is fed with the
judge's tensors in its place, rounded to float32.
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
    from hetpipe.bench.inturn import Crossing, See

    Array = np.ndarray[Any, Any]


class StepByLayers:
    """A step of which each layer is fed with the judge's tensors.

    `graphs` has a stage for every layer; `values` and `feed` are those of `StepInTurn`. `see` gets
    the gradients of the same programs in float64.
    """

    def __init__(
        self,
        graphs: Sequence[StageGraphs],
        samples: int,
        values: Mapping[str, Array],
        feed: Mapping[str, Array],
        lr: float,
        see: See,
    ) -> None:
        self._step = partial(StepInTurn, samples=samples, values=values, feed=feed)
        self._graphs, self._lr = graphs, lr
        self._filed = Filed()
        self._keys: list[dict[str, str]] = []  # by cut and name
        keep = _Keep(self._filed, self._keys)
        passes = [replace(stage, update=None) for stage in graphs]
        self._step(ExactDevice(), passes, cross=keep.cross).run(lr, see)
        trim_memory()

    def run(self, device: Device, see: See) -> tuple[float, dict[str, float]]:
        """The loss, and the relative errors of tensors that leave layers, by norms.

        `see` gets each parameter once.
        """
        swap = _Swap(self._filed, self._keys)
        loss = self._step(device, self._graphs, cross=swap.cross).run(self._lr, see)
        return loss, swap.errors


class _Keep:
    """Files the judge's tensors at the cuts, in the order of the passes.

    A tensor that only passes by is the same buffer at the next cut: it is filed once.
    """

    def __init__(self, filed: Filed, keys: list[dict[str, str]]) -> None:
        self._filed, self._keys = filed, keys
        self._last: Crossing = {}

    def cross(self, crossing: Crossing) -> Crossing:
        """File them."""
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
    """Puts the judge's tensors in the place of a device's, which it compares with them.

    A tensor that only passes by is compared and uploaded once.
    """

    def __init__(self, filed: Filed, keys: Sequence[Mapping[str, str]]) -> None:
        self.errors: dict[str, float] = {}
        self._filed = filed
        self._keys = iter(keys)
        self._entering: Crossing = {}  # the last ones on the device

    def cross(self, crossing: Crossing) -> Crossing:
        """The judge's."""
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
    """A tensor on the device of a buffer."""
    uploaded, event = buffer.device.upload(tensor.numpy())
    event.wait()
    return uploaded
