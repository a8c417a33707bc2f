"""LossCost: the price of a loss over a whole mini-batch, which the controller computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hetpipe.records import OneOf, Positive, Seconds
from hetpipe.words import format_s

Label = Annotated[str, OneOf(("measured", "inferred", "emulated", "modelled"))]


@dataclass(frozen=True)
class LossCost:
    """The seconds from the last forward to the first backward if one device has the last stage.

    The outputs travel to the controller, and the gradients back. `travel` and `loss` are the
    labels of their times.
    """

    mini_batch: Positive  # samples
    outputs_s: Seconds
    loss_s: Seconds
    gradients_s: Seconds
    travel: Label = "measured"
    loss: Label = "measured"

    @property
    def total_s(self) -> float:
        """The seconds of all three parts, which follow one another."""
        return self.outputs_s + self.loss_s + self.gradients_s

    def __str__(self) -> str:
        return (
            f"the loss of the mini-batch takes {format_s(self.total_s)} of each step: "
            f"{format_s(self.outputs_s)} for the outputs' way to the pipeline's process and "
            f"{format_s(self.gradients_s)} for the gradients' way back ({self.travel}), and "
            f"{format_s(self.loss_s)} for the loss itself ({self.loss})"
        )
