"""Reads weights and the optimizer's state from a folder of `torch.distributed.checkpoint`."""

from __future__ import annotations

import logging
import pickle
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.checkpoint.checkpoint import Checkpoint
from hetpipe.checkpoint.tensors import Array, Outline, Tensors
from hetpipe.errors import CheckpointError
from hetpipe.optim.rule import AVERAGE
from hetpipe.pipeline.resume import ROLES, manifest_of
from hetpipe.pipeline.torch_files import STATES
from hetpipe.words import words

if TYPE_CHECKING:
    from hetpipe.pipeline.training import Training

log = logging.getLogger("hetpipe")

UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, LookupError, TypeError,
    ValueError,
)  # fmt: skip
"""The errors of a pickle that is damaged, or of another version of torch."""
_MODEL = ("model.", "")
_OPTIM = ("optim.state.", "optimizer.state.")
"""The begins of entries' names that programs use."""


def read_dcp(directory: Path, training: Training, names: Mapping[str, str]) -> Checkpoint:
    """Return a checkpoint for a training at rest, with the values in a folder.

    `names` has the names in the model's `state_dict`, each with the tensor's name. Tensors of the
    loss keep their values. If the folder lacks a state of the optimizer, all states begin at zero,
    and the log says so. Raises `CheckpointError` for a folder of another model.
    """
    folder, optimizer = _Folder(directory), training.setup.optimizer
    present = {role: training.tensors(role) for role in ROLES}
    aliases: dict[str, list[str]] = {}
    for name, source in names.items():
        aliases.setdefault(source, []).append(name)

    def state_key(state: str, end: str | None = None) -> str | None:
        kind, _, name = state.partition("/")
        end = end or STATES.get(optimizer.name, {}).get(kind, kind)
        return folder.key(_OPTIM, aliases.get(name, [name]), f".{end}")

    keys: dict[str, dict[str, str]] = {}
    for role in (PARAM, BUFFER):
        found = {n: folder.key(_MODEL, aliases[n], "") for n in present[role] if n in aliases}
        keys[role] = folder.complete(found)
    states = [state for state in present[STATE] if not state.startswith(f"{AVERAGE}/")]
    try:
        keys[STATE] = folder.complete({state: state_key(state) for state in states})
    except CheckpointError as error:
        log.warning("the optimizer's states begin at zero: %s", error)
        keys[STATE] = {}
    steps = {key for state in keys[STATE] if (key := state_key(state, "step")) is not None}
    outlines = {key: present[role].outlines[n] for role in keys for n, key in keys[role].items()}
    values, updates = folder.read(outlines, steps)
    read = {role: Tensors.of({n: values[key] for n, key in keys[role].items()}) for role in keys}
    tensors = {}
    for role in (PARAM, BUFFER):
        loss = present[role].only(present[role].keys() - aliases.keys())
        tensors[role] = read[role].over(Tensors.of(loss.arrays()))
    zeros = Tensors.of({state: np.zeros(*present[STATE].outlines[state]) for state in states})
    averages = {name: name.partition("/")[2] for name in present[STATE] if name not in states}
    tensors[STATE] = read[STATE].over(zeros).over(tensors[PARAM].renamed(averages))
    manifest = manifest_of(training, optimizer, training.setup.settings, names, {})
    manifest["step"] = updates * training.setup.updates.accumulate
    most = max(updates, 1) if keys[STATE] else 0  # torch does not count the updates of SGD
    manifest["updates"] = [most] * len(training.updates)
    return Checkpoint(manifest, tensors, directory)


class _Folder:
    """A folder in torch's distributed format, whose entries have dotted names."""

    def __init__(self, path: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        self._path = path
        try:
            self._entries = FileSystemReader(path).read_metadata().state_dict_metadata
        except UNREADABLE as error:
            raise CheckpointError(
                f"{path} is no folder of torch.distributed.checkpoint: {error}; give the folder "
                "with the file .metadata"
            ) from error

    def key(self, begins: Iterable[str], names: Iterable[str], end: str) -> str | None:
        """Return the entry of a tensor with these names."""
        keys = (f"{begin}{name}{end}" for begin in begins for name in names)
        return next((key for key in keys if key in self._entries), None)

    def complete(self, keys: Mapping[str, str | None]) -> dict[str, str]:
        """Return the same entries. Raises `CheckpointError` if one is lacking."""
        if lacking := [name for name, key in keys.items() if key is None]:
            raise CheckpointError(
                f"{self._path} lacks {words(lacking)}: give a folder of this model and optimizer"
            )
        return {name: key for name, key in keys.items() if key is not None}

    def read(
        self, outlines: Mapping[str, Outline], steps: Iterable[str]
    ) -> tuple[dict[str, Array], int]:
        """Return the tensors that `outlines` describes, by entry, and the largest of `steps`.

        Raises `CheckpointError` for a tensor of another shape or of a wider dtype.
        """
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        state = {key: self._place(key) for key in (*outlines, *steps)}
        dtypes = {k: torch.from_numpy(np.empty(0, o.dtype)).dtype for k, o in outlines.items()}
        for key, mine in dtypes.items():
            shape, dtype = tuple(state[key].shape), state[key].dtype
            if shape != outlines[key].shape or torch.promote_types(dtype, mine) != mine:
                raise CheckpointError(
                    f"{key} is {dtype}{list(shape)} in {self._path} and {mine}"
                    f"{list(outlines[key].shape)} in the model: give a folder of this model"
                )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that there is one process
                load(state, checkpoint_id=self._path, no_dist=True)
        except CheckpointException as error:
            (failure, _), *_ = error.failures.values()
            raise CheckpointError(f"cannot read {self._path}: {failure}") from error
        values = {key: state[key].to(mine).numpy() for key, mine in dtypes.items()}
        return values, max((int(state[step]) for step in steps), default=0)

    def _place(self, key: str) -> Any:
        """Return a tensor to read an entry into; an entry that is a number is read as one."""
        import torch
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        entry = self._entries[key]
        if isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return torch.zeros((), dtype=torch.int64)
