"""Callbacks that watch one loss or metric: the best checkpoint, and an early end."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hetpipe.callbacks.base import Callback, State
from hetpipe.callbacks.history import Epoch
from hetpipe.errors import HetpipeError
from hetpipe.files import user_path
from hetpipe.words import choices


class Monitor(Callback):
    """Watches the value `monitor` of epochs: `loss`, `eval_loss` or a metric.

    By default a loss is better if it is lower, and a metric if it is higher; `mode` is "min" or
    "max" for another rule.
    """

    def __init__(self, monitor: str, mode: str | None = None) -> None:
        if mode not in (None, "min", "max"):
            raise HetpipeError(f"mode={mode!r}: give 'min' if lower values are better, or 'max'")
        self.monitor, self.mode = monitor, mode

    def begin(self, state: State) -> None:
        """Raise `HetpipeError` if no epoch will have the value."""
        if not state.more_names:
            self._check(state.names)

    def epoch(self, state: State, row: Epoch) -> None:
        """Raise `HetpipeError` if the epoch lacks the value."""
        self._check(row.values)

    def best(self, state: State) -> Epoch | None:
        """Return the best epoch so far."""
        return state.history.best(self.monitor, self.mode)

    def _check(self, names: Iterable[str]) -> None:
        if self.monitor not in names:
            hint = choices(self.monitor, names)
            raise HetpipeError(f"monitor={self.monitor!r}: no epoch has this value; {hint}")


class BestCheckpoint(Monitor):
    """Saves a checkpoint after each epoch that is better than all epochs before."""

    def __init__(self, folder: str | Path, monitor: str, mode: str | None = None) -> None:
        super().__init__(monitor, mode)
        self.folder = user_path(folder)

    def epoch(self, state: State, row: Epoch) -> None:
        """Save if this epoch is the best."""
        super().epoch(state, row)
        if self.best(state) is row:
            state.pipeline.save(self.folder)


class EarlyStopping(Monitor):
    """Stops the fit after `patience` epochs in a row that are not better than the best one."""

    def __init__(self, monitor: str, patience: int, mode: str | None = None) -> None:
        super().__init__(monitor, mode)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise HetpipeError(f"patience={patience!r}: give a number of epochs, 1 or more")
        self.patience = patience

    def begin(self, state: State) -> None:
        """Stop at once if the fit is resumed after its patience has ended."""
        super().begin(state)
        self._stop_if_due(state)

    def epoch(self, state: State, row: Epoch) -> None:
        """Stop if the patience has ended."""
        super().epoch(state, row)
        self._stop_if_due(state)

    def _stop_if_due(self, state: State) -> None:
        best = self.best(state)
        if len(state.history.epochs) - (best.epoch if best else 0) >= self.patience:
            state.stop()
