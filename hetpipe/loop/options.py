"""Options of `Pipeline.fit`, as a record that checks itself."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict

from hetpipe.callbacks.base import Callback
from hetpipe.callbacks.history import COUNTS, LOSSES
from hetpipe.callbacks.monitors import BestCheckpoint, EarlyStopping
from hetpipe.callbacks.progress import Progress
from hetpipe.errors import HetpipeError
from hetpipe.files import user_path
from hetpipe.loop.batches import Batches, Source, Split
from hetpipe.report.progress import is_watched
from hetpipe.words import choices, short

ARGUMENTS = ("eval_data", "metrics", "callbacks")
"""The keywords of `Pipeline.fit` that are not options."""


class FitOptions(TypedDict, total=False):
    """The keywords of `Pipeline.fit`, for type checkers; `Settings` explains them."""

    split: Split | None
    folder: str | Path | None
    resume: bool | Literal["auto"]
    save_every: int | None
    monitor: str | None
    mode: str | None
    patience: int | None
    progress: bool | None
    ema: bool


@dataclass(frozen=True)
class Settings:
    """The options of a fit. Raises `HetpipeError` for options that are wrong."""

    split: Split | None = None
    """The name or names of the labels in a batch that is a dict, or a function that returns (x, y)
    for a batch."""
    folder: str | Path | None = None
    """The folder of the checkpoints `last`, written after each epoch and on an interrupt, and
    `best`, written when the monitored value improves."""
    resume: bool | str = False
    """Whether to continue from `last`: True, or `auto`: if there is one. False begins anew and
    replaces `last`. A line on standard error says where a fit continues, unless `progress` is
    False."""
    save_every: int | None = None
    """The number of updates after which `last` is written as well."""
    monitor: str | None = None
    """`loss`, `eval_loss` or a metric: the value for `best` and for `patience`."""
    mode: str | None = None
    """`min` or `max`: whether lower or higher values are better. By default a loss is better if it
    is lower, and a metric if it is higher."""
    patience: int | None = None
    """The number of epochs in a row without a better value after which the fit stops."""
    progress: bool | None = None
    """Whether to show the progress; None: in terminals and notebooks."""
    ema: bool = False
    """Whether evaluations use the average of the weights."""

    def __post_init__(self) -> None:
        if self.resume not in (True, False, "auto"):
            raise HetpipeError(f"resume={self.resume!r}: give True, False or 'auto'")
        for name in ("resume", "save_every"):
            if getattr(self, name) and self.folder is None:
                raise HetpipeError(f"{name}={getattr(self, name)!r} needs a folder: give folder=")
        if self.save_every is not None:
            check_count("save_every", self.save_every)
        if self.monitor is None:
            for name in ("patience", "mode"):
                if getattr(self, name) is not None:
                    raise HetpipeError(
                        f"{name}={getattr(self, name)!r} needs the value to watch: give monitor="
                    )
        elif self.patience is None and self.folder is None:
            raise HetpipeError(
                f"monitor={self.monitor!r} changes nothing alone: give patience= to stop early, or "
                "folder= to keep the best checkpoint"
            )

    @property
    def own_callbacks(self) -> list[Callback]:
        """The callbacks that carry out `monitor`, `patience` and `folder`."""
        found: list[Callback] = []
        if self.monitor is not None and self.folder is not None:
            found.append(BestCheckpoint(user_path(self.folder) / "best", self.monitor, self.mode))
        if self.monitor is not None and self.patience is not None:
            found.append(EarlyStopping(self.monitor, self.patience, self.mode))
        return found


@dataclass(frozen=True)
class Task:
    """Everything that a fit was asked to do."""

    epochs: int
    batches: Batches
    eval_data: Batches | None
    metrics: Mapping[str, Any]
    callbacks: tuple[Callback, ...]
    settings: Settings
    folder: Path | None

    @property
    def names(self) -> tuple[str, ...]:
        """The losses and metrics that each epoch will have."""
        return (*LOSSES, *self.metrics) if self.eval_data is not None else LOSSES[:1]

    @property
    def more_names(self) -> bool:
        """Whether a metric may return a dict of values, whose names replace the metric's."""
        return any(hasattr(metric, "update") for metric in self.metrics.values())


def task_of(
    epochs: int,
    batches: Source,
    eval_data: Source | None,
    metrics: Mapping[str, Any] | None,
    callbacks: Sequence[Callback],
    options: Mapping[str, Any],
) -> Task:
    """Return the task of a fit. Raises `HetpipeError` for arguments that are wrong."""
    known = [*ARGUMENTS, *(field.name for field in fields(Settings))]
    for name in options:
        if name not in known:
            raise HetpipeError(f"fit has no option {name!r}; {choices(name, known)}")
    settings = Settings(**options)
    check_count("epochs", epochs)
    check_metrics(metrics, eval_data is not None, epochs)
    if not isinstance(callbacks, Iterable):
        raise HetpipeError(f"callbacks is {short(callbacks)}: give a list of callbacks")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise HetpipeError(
                f"a callback is {short(callback)}: give objects whose class is a child of "
                "hp.callbacks.Callback"
            )
    shown = settings.progress if settings.progress is not None else is_watched()
    shows = shown and not any(isinstance(callback, Progress) for callback in callbacks)
    folder = None if settings.folder is None else user_path(settings.folder)
    task = Task(
        epochs,
        Batches(batches, settings.split, "batches", epochs),
        None if eval_data is None else Batches(eval_data, settings.split, "eval_data", epochs),
        metrics or {},
        (*settings.own_callbacks, *callbacks, *([Progress()] if shows else [])),
        settings,
        folder,
    )
    if folder is not None:
        check_writable(folder)
    return task


def check_metrics(metrics: Mapping[str, Any] | None, evaluates: bool, epochs: int) -> None:
    """Raise `HetpipeError` for metrics that no evaluation can compute."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping):
        raise HetpipeError(f"metrics are {type(metrics).__name__}: give a dict of functions")
    if metrics and not evaluates:
        raise HetpipeError(f"metrics {', '.join(metrics)} need eval_data: give eval_data=")
    for name, metric in metrics.items():
        if not callable(metric) and not hasattr(metric, "update"):
            raise HetpipeError(
                f"metric {name!r} is {short(metric)}: give a function of (output, y), or an object "
                "with update(output, y) and compute()"
            )
        if name in (*LOSSES, *COUNTS):
            raise HetpipeError(f"a metric must not be named {name!r}, as a value of each epoch is")
        if epochs > 1 and hasattr(metric, "update") and not hasattr(metric, "reset"):
            raise HetpipeError(
                f"metric {name!r} collects mini-batches and has no method reset(): an evaluation "
                "would also count the mini-batches of the epochs before it; give it a reset()"
            )


def check_count(name: str, value: object) -> None:
    """Raise `HetpipeError` unless a value is a whole number of 1 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise HetpipeError(f"{name}={value!r}: give a whole number of 1 or more")


def check_writable(folder: Path) -> None:
    """Make a folder. Raises `HetpipeError` if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise HetpipeError(
            f"folder={str(folder)!r} cannot be written: {error.strerror or error}; give another "
            "folder"
        ) from error
