"""Loss and gradients of one mini-batch, without an update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.program import BUFFER, GRAD
from hetpipe.pipeline.batches import mean_loss
from hetpipe.pipeline.schedules import ALL, UPDATING

if TYPE_CHECKING:
    from hetpipe.pipeline.training import Training
    from hetpipe.wire.messages import Array


def gradients_of(
    training: Training, x: Any, y: Any, *, summed: bool = False
) -> tuple[float, dict[str, Array]]:
    """Return loss and gradients of one mini-batch, by parameter. The training must be at rest.

    If the loss is a sum with a count, these are the gradients of the mean or, with `summed`, the
    gradients of the sum.
    """
    crew = training.setup.crew
    buffers = crew.buffers()
    request = training.request(x, y)
    result = training.run(request, ALL - UPDATING)
    grads = training.tensors(GRAD).arrays()
    zeros = {name: np.zeros_like(grad) for name, grad in grads.items()}
    for replica, values in enumerate(buffers):
        crew.write(BUFFER, values, replica)
    crew.write(GRAD, training.setup.captured.parts.split(zeros))
    loss = mean_loss(result, request.samples, training.steps)
    count = 1.0 if summed or result.counts is None else sum(result.counts)
    scale = training.scaling.scale * count
    return loss, {name: np.asarray(grad / scale) for name, grad in grads.items()}
