"""Automatic checkpoints, which are written while the training continues."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.checkpoint.series import Series
from hetpipe.checkpoint.tensors import Tensors
from hetpipe.crew.copies import Copies
from hetpipe.errors import HetpipeError
from hetpipe.pipeline.copied import copy_values
from hetpipe.pipeline.resume import finite, manifest_of, saved_text

if TYPE_CHECKING:
    from hetpipe.checkpoint.checkpoint import Checkpoint
    from hetpipe.pipeline.model_state import ModelState
    from hetpipe.pipeline.options import SaveOptions
    from hetpipe.pipeline.training import Training

log = logging.getLogger("hetpipe")

NEVER = -1
"""The step of a checkpoint that is not there yet."""
SLOW_S = 1.0
"""A wait for an earlier write that is longer is told in the log, once."""


class Autosave:
    """Saves a training every `every` mini-batches, if the options name a folder.

    The training waits until its values are copied to the controller's memory. A thread writes the
    copy. If the next checkpoint is due before, the training waits for the thread, so the steps of
    the checkpoints do not depend on the disk.
    """

    def __init__(self, options: SaveOptions) -> None:
        folder = options.checkpoint
        self._series = None if folder is None else Series(folder, options.keep)
        self._every = options.every
        self._names: Mapping[str, str] = {}
        self._saved_step = 0
        self._copies = Copies(most=1)
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None  # of the thread, until a call raises it
        self._has_told = False

    def begin(self, say: Callable[[str], None]) -> Checkpoint | None:
        """Hold the folder, and return the checkpoint to continue from, if there is one; `say` tells
        the user."""
        if self._series is None:
            return None
        found = self._series.hold()
        if found is not None:
            say(f"the training continues from {found.directory}")
        return found

    def continue_from(self, step: int) -> None:
        """Count on from the step of a checkpoint that the training continues from. If it gave up
        later checkpoints, the next mini-batch is saved, so that no restart continues from those."""
        gave_up = self._saved_step == NEVER or step < self._saved_step
        self._saved_step = NEVER if gave_up else step

    def meet(self, state: ModelState) -> None:
        """Take the names of the model's `state_dict`, and warn of entries that are not saved."""
        self._names = state.sources
        if self._series is not None:
            state.warn_of_extra()

    def is_due(self, training: Training) -> bool:
        """Whether a checkpoint should be saved now."""
        if self._series is None or training.accumulated:
            return False
        return training.steps // self._every != self._saved_step // self._every

    def holds(self, folder: Path) -> bool:
        """Whether the training saves into this folder."""
        return self._series is not None and folder.resolve() == self._series.directory.resolve()

    def save(
        self, training: Training, notes: Mapping[str, Any] | None = None, force: bool = False
    ) -> None:
        """Copy the values of a training at rest, and begin to write them. Without `force`, raises
        `CheckpointError` if a loss or gradient that was not finite has been applied."""
        assert self._series is not None
        self._wait_for_earlier()
        directory, setup = self._series.directory, training.setup
        values: Mapping[str, Tensors] = copy_values(training, self._copies)
        if not force:
            values = finite(directory, training, values)
        manifest = manifest_of(training, setup.optimizer, setup.settings, self._names, notes or {})
        self._saved_step = training.steps
        self._thread = threading.Thread(
            target=self._write, args=(self._series, training, values, manifest),
            name="hetpipe checkpoint",
        )  # fmt: skip
        self._thread.start()

    @property
    def checks(self) -> list[Callable[[str], None]]:
        """The functions that `Guard` should call before each public call."""
        return [] if self._series is None else [_refuse_fit, self._raise_error]

    def _raise_error(self, call: str) -> None:
        """Raise the error of the last write, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for the write under way."""
        if self._thread is not None:
            self._thread.join()

    def complete(self) -> None:
        """Wait for the write under way. Raises its error."""
        self.finish()
        self._raise_error("save")

    def close(self) -> None:
        """Wait for the write under way, and give the folder free. Raises its error."""
        self.finish()
        if self._series is not None:
            self._series.release()
        self._raise_error("close")

    def _wait_for_earlier(self) -> None:
        begin_s = time.monotonic()
        self.finish()
        waited_s = time.monotonic() - begin_s
        if waited_s > SLOW_S and not self._has_told:
            self._has_told = True
            log.warning(
                "the training waited %.1f s until the checkpoint of step %d was written: give "
                "every= above %d, or a faster disk",
                waited_s, self._saved_step, self._every,
            )  # fmt: skip

    def _write(
        self,
        series: Series,
        training: Training,
        values: Mapping[str, Tensors],
        manifest: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint on the thread `hetpipe checkpoint`."""
        try:
            folder = series.save(values, manifest)
        except Exception as error:
            log.error("%s", error)
            self._error = error
        else:
            training.last_save = saved_text(manifest["step"], folder)


def _refuse_fit(call: str) -> None:
    if call == "fit":
        raise HetpipeError(
            "fit() writes checkpoints with its place in the epoch, and checkpoint= writes others: "
            "give fit(folder=..., resume='auto', save_every=...), and leave checkpoint= out"
        )
