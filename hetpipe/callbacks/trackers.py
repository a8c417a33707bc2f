"""Callbacks that send losses and metrics to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from hetpipe.callbacks.base import Callback, Result, State
from hetpipe.callbacks.history import Epoch
from hetpipe.errors import HetpipeError
from hetpipe.files import user_path


class Tracker(Callback, ABC):
    """Sends values to a service, at the number of an update.

    After every `every`-th mini-batch: `loss`, `lr` (of the first group of parameters) and, if it is
    known, `gradient_norm`. After an epoch: its losses and metrics, as `epoch/loss`.
    """

    def __init__(self, every: int = 1) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise HetpipeError(f"every={every!r}: give a number of mini-batches, 1 or more")
        self.every = every

    @abstractmethod
    def log(self, values: Mapping[str, float], update: int) -> None:
        """Send values."""

    def step(self, state: State, result: Result) -> None:
        """Send the loss and the learning rate of every `every`-th mini-batch."""
        if result.index % self.every == 0:
            values = {"loss": result.loss, "lr": result.rates[0]}
            if result.gradient_norm is not None:
                values["gradient_norm"] = result.gradient_norm
            self.log(values, result.update)

    def epoch(self, state: State, row: Epoch) -> None:
        """Send the losses and metrics of an epoch."""
        self.log({f"epoch/{name}": value for name, value in row.values.items()}, row.update)


class TensorBoard(Tracker):
    """Writes files for TensorBoard into a folder."""

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        super().__init__(every)
        self.folder = user_path(folder)
        self._writer: Any = None

    def begin(self, state: State) -> None:
        """Open a file. Raises `HetpipeError` without the package tensorboard."""
        writer = _module("torch.utils.tensorboard", "tensorboard").SummaryWriter
        after = state.update + 1 if state.resumed else None
        self._writer = writer(str(self.folder), purge_step=after)

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Write scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def end(self, state: State) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Tracker):
    """Sends values to Weights & Biases; `options` are the arguments of `wandb.init`.

    Without options, and if a run is active, sends them to this run and leaves it open.
    """

    def __init__(self, every: int = 1, **options: object) -> None:
        super().__init__(every)
        self._options = options
        self._joins = False
        self._run: Any = None

    def begin(self, state: State) -> None:
        """Begin a run. Raises `HetpipeError` without the package wandb."""
        wandb = _module("wandb")
        self._joins = not self._options and wandb.run is not None
        self._run = wandb.run if self._joins else wandb.init(**self._options)

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Send values."""
        self._run.log(dict(values), step=update)

    def end(self, state: State) -> None:
        """End a run that began here, as failed after an exception."""
        if not self._joins:
            self._run.finish(exit_code=0 if state.error is None else 1)


class MLflow(Tracker):
    """Sends values to MLflow; `options` are the arguments of `mlflow.start_run`.

    Without options, and if a run is active, sends them to this run and leaves it open.
    """

    def __init__(self, every: int = 1, **options: object) -> None:
        super().__init__(every)
        self._options = options
        self._joins = False
        self._mlflow: Any = None

    def begin(self, state: State) -> None:
        """Begin a run. Raises `HetpipeError` without the package mlflow."""
        self._mlflow = _module("mlflow")
        self._joins = not self._options and self._mlflow.active_run() is not None
        if not self._joins:
            self._mlflow.start_run(**self._options)

    def log(self, values: Mapping[str, float], update: int) -> None:
        """Send values."""
        self._mlflow.log_metrics(dict(values), step=update)

    def end(self, state: State) -> None:
        """End a run that began here; an interrupt has the status KILLED, and an error FAILED."""
        status = "FINISHED" if state.error is None else "KILLED"
        if not self._joins:
            self._mlflow.end_run("FAILED" if isinstance(state.error, Exception) else status)


def _module(name: str, package: str = "") -> Any:
    """Import a module. Raises `HetpipeError` that names the package to install."""
    try:
        return import_module(name)
    except ImportError as error:
        package = package or name
        raise HetpipeError(
            f"the callback needs the package {package}: pip install {package} ({error})"
        ) from error
