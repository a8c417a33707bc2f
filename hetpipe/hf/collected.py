"""Collected: a metric that hands all outputs and labels to a function, as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from hetpipe.errors import HetpipeError
from hetpipe.hf.model_losses import logits_of
from hetpipe.pipeline.forwards import number_of

PADDING = -100
"""The label that losses ignore; it fills logits and labels up to the longest ones."""
Compute = Callable[[Any], Mapping[str, float]]
"""Maps an `EvalPrediction`, all logits and labels, to metrics by name."""


class Collected:
    """Collects the logits and labels of an evaluation. `prefix` begins the names of metrics."""

    def __init__(self, compute: Compute | None, prefix: str) -> None:
        self._compute, self._prefix = compute, prefix
        self.reset()

    def reset(self) -> None:
        """Forget all mini-batches."""
        self._logits: list[Any] = []
        self._labels: list[Any] = []

    def update(self, output: Any, y: Any) -> None:
        """Add a mini-batch."""
        self._logits.append(logits_of(output).float().numpy())
        if isinstance(y, Tensor):
            self._labels.append(y.numpy())

    def compute(self) -> dict[str, float]:
        """Return the metrics."""
        from transformers import EvalPrediction

        if self._compute is None:
            return {}
        found = self._compute(EvalPrediction(self.logits, self.labels))
        if not isinstance(found, Mapping):
            raise HetpipeError(
                f"compute_metrics returned a {type(found).__name__}: return a dict of numbers"
            )
        return {f"{self._prefix}{name}": number_of(name, value) for name, value in found.items()}

    @property
    def logits(self) -> Any:
        """The logits of all samples, as one numpy array."""
        return joined(self._logits)

    @property
    def labels(self) -> Any:
        """The labels of all samples; None if there are none."""
        return joined(self._labels) if self._labels else None


def joined(parts: Sequence[Any]) -> Any:
    """Join arrays of mini-batches along axis 0. Shorter ones are padded with `PADDING` along the
    other axes, as transformers does."""
    most = np.max([part.shape[1:] for part in parts], axis=0).astype(int)
    padded = []
    for part in parts:
        lacking = [(0, int(size)) for size in most - part.shape[1:]]
        padded.append(np.pad(part, [(0, 0), *lacking], constant_values=PADDING))
    return np.concatenate(padded)
