"""Loop: trains epochs on a pipeline, evaluates after each, calls callbacks, saves and resumes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Protocol

from hetpipe.callbacks.base import Pipeline, State
from hetpipe.callbacks.history import Epoch, History
from hetpipe.checkpoint.checkpoint import MANIFEST
from hetpipe.checkpoint.durable import locked
from hetpipe.errors import CheckpointError, HetpipeError
from hetpipe.loop.batches import Batches, length_of
from hetpipe.loop.chance import (
    default_states,
    from_text,
    loader_states,
    set_default,
    set_loader,
    to_text,
)
from hetpipe.loop.options import Task
from hetpipe.loop.position import Position, position_of


class Signals(Protocol):
    """Interrupts, which wait until the loop lets them in."""

    def deliver(self) -> None:
        """Run the handler of a waiting signal, which may raise an error."""


class Loop:
    """A fit. `accumulate` is the number of mini-batches that make one update."""

    def __init__(self, pipe: Pipeline, task: Task, signals: Signals, accumulate: int) -> None:
        self._pipe, self._task, self._signals = pipe, task, signals
        self._accumulate = accumulate
        self._most = (task.settings.save_every or 0) * accumulate  # mini-batches between two saves
        self._last = None if task.folder is None else task.folder / "last"
        self._state = State(pipe, task.epochs, task.names, History(), more_names=task.more_names)
        self._position = Position()
        self._chance: tuple[Any, list[Any]] | None = None  # at the begin of the epoch
        self._loader: Any = ()  # of the epoch
        self._interrupt: BaseException | None = None  # the error of a signal's handler

    def run(self) -> History:
        """Train until the last epoch, or until a callback stops the fit; return the history.
        Raises `CheckpointError` if another fit holds the folder."""
        with ExitStack() as held:
            if self._task.folder is not None:
                _hold(self._task.folder, held)
            return self._run()

    def _run(self) -> History:
        state, task = self._state, self._task
        if self._last is not None:
            self._resume(self._last)
        with ExitStack() as ends:
            try:
                for callback in task.callbacks:
                    callback.begin(state)
                    ends.callback(callback.end, state)
                while self._position.epoch <= task.epochs and not state.stopping:
                    self._train_epoch()
            except BaseException as error:
                state.error = error
                if error is self._interrupt:
                    self._save_after(error)
                raise
        return state.history

    def _resume(self, last: Path) -> None:
        """Continue from the checkpoint in `last`, if the user asked for this."""
        settings, state = self._task.settings, self._state
        if not settings.resume:
            return
        if not (last / MANIFEST).exists():
            if settings.resume != "auto":
                raise CheckpointError(
                    f"resume=True: there is no checkpoint in {last}; give the folder of the fit "
                    "to continue, or resume='auto' to begin anew without one"
                )
            self._tell(f"fit begins anew: there is no checkpoint in {last}")
            return
        self._position = position = position_of(self._pipe.restore(last), last)
        self._tell(position.place(self._task.epochs, last))
        self._chance = from_text(position.chance)
        state.history.epochs.extend(position.history)
        state.update, state.resumed = position.update, True

    def _tell(self, line: str) -> None:
        """Write a line to standard error, unless the user wants no progress."""
        if self._task.settings.progress is not False:
            print(line, file=sys.stderr, flush=True)

    def _train_epoch(self) -> None:
        """Train and evaluate an epoch. Return before its end if a callback stops the fit."""
        state, position, task = self._state, self._position, self._task
        batches = self._begin_epoch()
        while not position.ended:
            self._train(batches)
            if self._interrupt is not None:
                raise self._interrupt
            if not position.ended:
                self._save()
                if state.stopping:
                    return
        if not position.batches:
            raise HetpipeError(f"epoch {position.epoch} has no mini-batch: give at least one")
        self._pipe.flush()
        row = self._evaluate()
        state.history.epochs.append(row)
        for callback in task.callbacks:
            callback.epoch(state, row)
        self._position = Position(position.epoch + 1, update=position.update)
        self._chance = default_states(), loader_states(task.batches.loader)
        self._save()
        self._signals.deliver()

    def _begin_epoch(self) -> Iterator[Any]:
        """Return the mini-batches of the epoch that have not been trained."""
        state, position = self._state, self._position
        default, own = self._chance or (default_states(), [])
        set_default(default)
        self._loader = loader = self._task.batches.of(position.epoch)
        if own:
            set_loader(loader, own)
        self._chance = default, loader_states(loader)
        state.epoch, state.batch = position.epoch, position.batches
        state.batches = length_of(loader)
        if position.loader:
            loader.load_state_dict(from_text(position.loader))
        batches = self._drawn(loader)
        for number in range(0 if position.loader else position.batches):
            if next(batches, batches) is batches:
                raise CheckpointError(
                    f"epoch {position.epoch} has {number} mini-batches, and {position.batches} "
                    "were trained before: resume with the same mini-batches"
                )
            self._let_in()
        return batches

    def _train(self, batches: Iterator[Any]) -> None:
        """Train the mini-batches up to the next save, the end of the epoch, or a stop."""
        state, position, begin_s = self._state, self._position, time.perf_counter()
        with closing(self._pipe.run(self._pairs(batches))) as results:
            for result in results:
                position.sums.add(result)
                state.batch += 1
                state.update = position.update = result.update
                for callback in self._task.callbacks:
                    callback.step(state, result)
                self._poll()
        position.sums.took_s += time.perf_counter() - begin_s

    def _pairs(self, batches: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        """Yield mini-batches, and count them, up to the next save or stop."""
        position = self._position
        while True:
            ends = self._state.stopping or self._interrupt is not None
            if ends and position.batches % self._accumulate == 0:
                return
            try:
                batch = next(batches)
            except StopIteration:
                position.ended = True
                return
            except BaseException as error:
                if error is self._interrupt:
                    return
                raise
            pair = self._task.batches.pair(batch)
            position.batches += 1
            yield pair
            if self._most and position.batches % self._most == 0:
                return

    def _evaluate(self) -> Epoch:
        """Return the epoch, with the losses and metrics of an evaluation, if there is one."""
        task, position = self._task, self._position
        if task.eval_data is None:
            return position.sums.epoch(position.epoch)
        for metric in task.metrics.values():
            if hasattr(metric, "update") and hasattr(metric, "reset"):
                metric.reset()
        pairs = self._eval_pairs(task.eval_data)
        found = self._pipe.evaluate(pairs, task.metrics, ema=task.settings.ema)
        return position.sums.epoch(position.epoch, eval_loss=found.loss, metrics=found.metrics)

    def _eval_pairs(self, data: Batches) -> Iterator[tuple[Any, Any]]:
        """Yield the mini-batches of an evaluation; an interrupt ends it."""
        for batch in self._drawn(data.of(self._position.epoch)):
            self._let_in()
            yield data.pair(batch)

    def _drawn(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of an iterable. If it fails after an interrupt, raise the interrupt: the
        processes of a loader get the signal as well."""
        iterator = iter(batches)
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                return
            except Exception:
                self._let_in()
                raise
            yield batch

    def _poll(self) -> None:
        """Let a waiting signal in, and keep the error of its handler."""
        try:
            self._signals.deliver()
        except BaseException as error:
            self._interrupt = error

    def _let_in(self) -> None:
        """Let a waiting signal in, and raise the error of its handler."""
        self._poll()
        if self._interrupt is not None:
            raise self._interrupt

    def _save(self) -> None:
        """Save a checkpoint with the position, if there is a folder."""
        position, loader = self._position, self._loader
        if self._last is not None:
            position.history = tuple(self._state.history.epochs)
            position.chance = to_text(self._chance)
            if position.batches and hasattr(loader, "load_state_dict"):
                position.loader = to_text(loader.state_dict())
            self._pipe.save(self._last, notes=position.notes())

    def _save_after(self, interrupt: BaseException) -> None:
        """Save after an interrupt. If the save fails, the caller still gets the interrupt."""
        try:
            self._save()
        except CheckpointError as error:
            raise interrupt from error


def _hold(folder: Path, held: ExitStack) -> None:
    """Keep other fits away from the folder until `held` ends."""
    try:
        held.enter_context(locked(folder))
    except BlockingIOError as error:
        raise CheckpointError(
            f"another fit, or a pipeline with checkpoint=, holds the folder {folder}: wait until "
            "it ends, or give another folder="
        ) from error
