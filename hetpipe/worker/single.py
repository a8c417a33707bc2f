"""A stage on a device of this process, without a crew: one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from hetpipe.capture.program import COUNT, CUT, LOSS, TANGENT, Slot, StageGraphs
from hetpipe.schedule.action import Op
from hetpipe.sdk.backend import Buffer, Device
from hetpipe.wire.messages import Keep
from hetpipe.wire.wire import Array
from hetpipe.worker.bind import Key
from hetpipe.worker.stage import Pass, Stage

Crossing = Mapping[str, Buffer]
"""Tensors that cross a cut, by name."""
NOTHING: Crossing = MappingProxyType({})


class SingleStage:
    """A stage that trains one micro-batch after another; `feed` has the batch's leaves by name."""

    def __init__(
        self,
        device: Device,
        graphs: StageGraphs,
        values: Mapping[str, Array],
        keep: Keep,
        held: Mapping[Key, Buffer] | None = None,
    ) -> None:
        self.stage = Stage(device, graphs, np.zeros, keep, held=held)
        for key in self.stage.store.missing():
            self.stage.put(key, values[key[1]])
        self.loss = 0.0
        """Mean loss of the last forward; 0 on a stage without the loss."""
        self.grad_scale = 1.0
        """Factor from the gradients to the mean loss's gradients: 1 / count for a summed loss."""
        self._passes = graphs.passes

    def forward(
        self, samples: int, feed: Mapping[str, Array], activations: Crossing = NOTHING
    ) -> Crossing:
        """Run the forward; return the activations for the next stage."""
        passes = self._passes[samples]
        inputs = [slot for program in passes.programs for slot in program.inputs]
        self._arrive(_slots(inputs, CUT), activations)
        self.stage.run(Pass(Op.FORWARD, 0, samples, feed))
        if self.stage.has_loss:
            (loss,), counts = self.stage.results.take(LOSS) or (), self.stage.results.take(COUNT)
            self.grad_scale = 1 / counts[0] if counts else 1.0
            self.loss = float(loss * self.grad_scale)
        return self._depart(samples, _slots(passes.forward.outputs, CUT))

    def backward(
        self, samples: int, feed: Mapping[str, Array], tangents: Crossing = NOTHING
    ) -> Crossing:
        """Run the backward; return the tangents for the previous stage."""
        backward = self._passes[samples].backward
        if backward is None:
            return {}
        inputs = [slot for slot in _slots(backward.inputs, TANGENT) if slot.name != LOSS]
        self._arrive(inputs, tangents)
        self.stage.run(Pass(Op.BACKWARD, 0, samples, feed, loss_tangent=1.0))
        return self._depart(samples, _slots(backward.outputs, TANGENT))

    def _arrive(self, slots: Sequence[Slot], crossing: Crossing) -> None:
        self.stage.frames.arrive(0, tuple(slots), [crossing[slot.name] for slot in slots])

    def _depart(self, samples: int, slots: Sequence[Slot]) -> Crossing:
        buffers = self.stage.frames.depart(0, samples, tuple(slots))
        return {slot.name: buffer for slot, buffer in zip(slots, buffers, strict=True)}


def _slots(slots: Sequence[Slot], role: str) -> list[Slot]:
    """Return the distinct slots of a role."""
    return list({slot.key: slot for slot in slots if slot.role == role}.values())
