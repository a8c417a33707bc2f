"""What a pipeline has counted and measured so far."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hetpipe.pipeline.training import Training
    from hetpipe.simulate.timeline import Timeline


class Measurements:
    """The properties of a pipeline that its training measures."""

    _training: Training

    @property
    def steps(self) -> int:
        """The number of mini-batches handed in, including those before a checkpoint."""
        return self._training.steps

    @property
    def loss_scale(self) -> float:
        """The present factor of the loss's gradient."""
        return self._training.scaling.scale

    @property
    def skipped(self) -> int:
        """The number of updates that were left out because gradients were not finite."""
        return self._training.scaling.skipped

    @property
    def timeline(self) -> Timeline:
        """Measured timeline of the last step, or of the last mini-batches of a run.

        Raises `HetpipeError` before the first.
        """
        recent = self._training.taken("timeline")
        spans = tuple(span for result in recent for span in result.timeline.spans)
        return replace(recent[0].timeline, spans=spans, label=self._training.plan.label)

    @property
    def peak_nbytes(self) -> tuple[int, ...]:
        """By stage, the most bytes of buffers on a device, counted in the last mini-batches.

        Raises `HetpipeError` before the first step.
        """
        recent = self._training.taken("peak_nbytes")
        return tuple(map(max, zip(*(result.peak_nbytes for result in recent), strict=True)))

    @property
    def device_nbytes(self) -> dict[str, int]:
        """By member, the bytes in use after the last mini-batch, where its device counts them."""
        return dict(self._training.taken("device_nbytes")[-1].device_nbytes)
