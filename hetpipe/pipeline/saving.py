"""The calls of a pipeline that return, save and restore weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe.checkpoint.series import load as load_checkpoint
from hetpipe.errors import CheckpointError
from hetpipe.files import user_path
from hetpipe.pipeline.average import averaged
from hetpipe.pipeline.facts import Facts
from hetpipe.pipeline.model_state import load_state
from hetpipe.pipeline.resume import progress_of, write
from hetpipe.pipeline.torch_files import DCP

if TYPE_CHECKING:
    import torch

    from hetpipe.checkpoint.checkpoint import Checkpoint
    from hetpipe.pipeline.autosave import Autosave
    from hetpipe.pipeline.delivery import Delivery
    from hetpipe.pipeline.guard import Guard
    from hetpipe.pipeline.model_state import ModelState


class Saving(Facts):
    """A pipeline whose weights can be read, saved and restored."""

    _autosave: Autosave
    _delivery: Delivery
    _guard: Guard
    _loss_state: ModelState
    _state: ModelState

    def flush(self) -> None:
        """Wait until all mini-batches are applied, and apply accumulated gradients."""
        self._delivery.at_rest("flush", self._training.apply)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's parameters and buffers under their original names, on the CPU."""
        return self._delivery.at_rest("state_dict", lambda: self._state.read(self._training))

    def ema_state_dict(self) -> dict[str, torch.Tensor]:
        """Return `state_dict` with the average of each parameter in its place; buffers are not
        averaged. Raises `HetpipeError` without the option `ema`."""

        def read() -> dict[str, torch.Tensor]:
            with averaged(self._training):
                return self._state.read(self._training)

        return self._delivery.at_rest("ema_state_dict", read)

    def copy_to(self, model: torch.nn.Module, *, ema: bool = False) -> None:
        """Copy the present parameters and buffers into a model, such as the one in training.

        With `ema` copies the average of the parameters. Raises `HetpipeError` if the model has
        other names or shapes.
        """
        load_state(model, self.ema_state_dict() if ema else self.state_dict())

    def loss_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the loss's parameters and buffers, if it has any, under their original names. In
        checkpoints, gradients and `decay_exclude` the names begin with `loss.`."""
        training = self._training
        return self._delivery.at_rest("loss_state_dict", lambda: self._loss_state.read(training))

    def save(
        self, directory: str | Path, *, notes: Mapping[str, Any] | None = None, force: bool = False
    ) -> None:
        """Flush, and write a checkpoint, which replaces an earlier checkpoint in the folder. In the
        folder of `checkpoint=` it becomes the newest of the folder's checkpoints.

        It also keeps `notes`: JSON values by name, which `restore` returns. Raises
        `CheckpointError`; then the earlier checkpoint stays valid. Without `force`, refuses weights
        that are not finite, or that a loss or gradient that was not finite has updated.
        """
        with self._guard("save"):
            self.flush()
            self._state.warn_of_extra()
            path, training = user_path(directory, CheckpointError), self._training
            setup, names = training.setup, self._state.sources
            if self._autosave.holds(path):
                self._delivery.call("save", lambda: self._autosave.save(training, notes, force))
                self._autosave.complete()
                return
            self._delivery.call(
                "save",
                lambda: write(
                    path, training, setup.optimizer, setup.settings, names, notes or {}, force
                ),
            )

    def _restore(self, saved: Checkpoint | Path) -> None:
        if isinstance(saved, Path):
            from hetpipe.pipeline.torch_import import read_dcp

            saved = read_dcp(saved, self._training, self._state.sources)
        self._training.restore(saved)
        self._autosave.continue_from(self._training.steps)
        if self._survival is not None:
            self._survival.begin()

    def restore(self, directory: str | Path, *, format: str | None = None) -> dict[str, Any]:
        """Continue from a checkpoint, with the present plan; return the notes of `save`.

        With `format="dcp"` the folder is of `torch.distributed.checkpoint`, which unpickles files:
        read only folders that you trust. It has no notes.

        Weights, optimizer state and counts become the checkpoint's; later training is lost. Raises
        `CheckpointError` as `load` does; then nothing has changed. If a file was read only in part,
        every later call says so, until a restore succeeds.
        """
        self._autosave.finish()
        path = user_path(directory, CheckpointError)
        if format not in (None, DCP):
            raise CheckpointError(f"format={format!r} is not known; give {DCP!r}, or leave it out")
        saved = load_checkpoint(path) if format is None else path
        with self._guard("restore"):
            if not self._training.stages.fault:
                self._delivery.call("restore", self._delivery.settle_anyway)
            self._delivery.call("restore", lambda: self._restore(saved))
        return {} if isinstance(saved, Path) else progress_of(saved).notes
