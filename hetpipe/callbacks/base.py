"""Callback: the base class of callbacks; and the state that the loop hands to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hetpipe.callbacks.history import Epoch, History


class Result(Protocol):
    """The result of a mini-batch; see `hetpipe.pipeline.results.Result`."""

    @property
    def index(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def update(self) -> int: ...
    @property
    def rates(self) -> tuple[float, ...]: ...
    @property
    def gradient_norm(self) -> float | None: ...
    @property
    def took_s(self) -> float: ...


class Evaluation(Protocol):
    """The result of an evaluation."""

    @property
    def loss(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def metrics(self) -> dict[str, float]: ...


class Pipeline(Protocol):
    """The part of `hetpipe.Pipeline` that the loop uses."""

    def run(self, batches: Iterable[tuple[Any, Any]]) -> Any: ...
    def evaluate(
        self,
        batches: Iterable[tuple[Any, Any]],
        metrics: Mapping[str, Any] | None = None,
        *,
        ema: bool = False,
    ) -> Evaluation: ...
    def flush(self) -> None: ...
    def save(
        self, directory: str | Path, *, notes: Mapping[str, Any] | None = None, force: bool = False
    ) -> None: ...
    def restore(self, directory: str | Path) -> dict[str, Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    @property
    def steps(self) -> int: ...


@dataclass
class State:
    """The state of a fit, for callbacks; they call its methods, and change nothing else.

    `names` are the values that each epoch will have, such as `loss` and `accuracy`; with
    `more_names`, a metric may give values under other names. `epoch` and `batch` count from 1;
    before the first mini-batch of an epoch `batch` is 0. `batches` is the number of mini-batches of
    an epoch, if it is known. `update` is the number of the last update.
    `error` is the exception that ended the fit, or None.
    """

    pipeline: Pipeline
    epochs: int
    names: tuple[str, ...]
    history: History
    batches: int | None = None
    epoch: int = 0
    batch: int = 0
    update: int = 0
    resumed: bool = False
    more_names: bool = False
    stopping: bool = False
    error: BaseException | None = None

    def stop(self) -> None:
        """End the fit after the present update. In the middle of an epoch, the epoch gets no
        evaluation and no row of the history; a resumed fit continues it."""
        self.stopping = True


class Callback:
    """The base class of callbacks, whose methods do nothing.

    An exception in a method ends the fit. `end` is always called if `begin` has returned.
    """

    def begin(self, state: State) -> None:
        """Begin, before the first mini-batch. Raise `HetpipeError` for wrong arguments here."""

    def step(self, state: State, result: Result) -> None:
        """Use the result of a mini-batch; without flushes it comes some mini-batches late."""

    def epoch(self, state: State, row: Epoch) -> None:
        """Use the losses and metrics of an epoch, which is also the last of the history."""

    def end(self, state: State) -> None:
        """Close files. `state.error` is the exception that ended the fit, or None."""
