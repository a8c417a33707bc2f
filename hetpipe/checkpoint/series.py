"""The checkpoints of one training: a folder with a sub-folder for each saved step.

A checkpoint may also be in the folder itself, as `save` writes it. It is read, and never removed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from hetpipe.checkpoint import durable
from hetpipe.checkpoint.checkpoint import MANIFEST, Checkpoint, read, remove, save
from hetpipe.checkpoint.manifest import FormatError, read_manifest
from hetpipe.checkpoint.tensors import Array
from hetpipe.errors import CheckpointError
from hetpipe.files import user_path

log = logging.getLogger("hetpipe")

_FOLDER = re.compile(r"step-(\d{8,})")


def load(directory: str | Path) -> Checkpoint:
    """Open the newest valid checkpoint in `directory`, and check every byte of its files.

    If a newer checkpoint is damaged, a warning in the log says so. Raises `CheckpointError`, with
    the file's name, if there is no checkpoint, if all are damaged, and for another version of the
    format.
    """
    directory = user_path(directory, CheckpointError)
    while True:
        paths, faults = checkpoints(directory), []
        for path in paths:
            try:
                checkpoint = read(path)
            except FormatError:
                raise
            except CheckpointError as error:
                faults.append(error)
                continue
            for fault in faults:
                log.warning("the older checkpoint in %s is used: %s", path, fault)
            return checkpoint
        if paths == checkpoints(directory):  # otherwise a training removed them meanwhile
            break
    if faults:
        raise faults[0]
    return read(directory)  # raises


def checkpoints(directory: Path) -> list[Path]:
    """Return the folders of the checkpoints in `directory`, the newest first."""
    found = [(step, path) for step, path in _steps(directory) if (path / MANIFEST).exists()]
    if (directory / MANIFEST).exists():
        found.append((_step_of(directory), directory))
    return [path for _, path in sorted(found, reverse=True)]


class Row(NamedTuple):
    """A checkpoint in a folder: its step, if it can be read, and why it cannot be used."""

    folder: Path
    step: int | None
    nbytes: int
    fault: str


def survey(directory: str | Path) -> list[Row]:
    """Check the checkpoints in `directory`, the newest first. Raises `CheckpointError` if there are
    none."""
    directory = user_path(directory, CheckpointError)
    paths = checkpoints(directory)
    if not paths:
        raise CheckpointError(
            f"{directory} has no checkpoint; give the folder of checkpoint= or of save(), or "
            "`last` or `best` in the folder of fit()"
        )
    return [_row(path) for path in paths]


def _row(path: Path) -> Row:
    step = int(match[1]) if (match := _FOLDER.fullmatch(path.name)) else None
    try:
        manifest = read_manifest(path / MANIFEST)
        nbytes = sum(file.nbytes for files in manifest.files.values() for file in files)
        step = manifest.step
    except CheckpointError as error:
        return Row(path, step, 0, str(error))
    try:
        read(path)
    except CheckpointError as error:
        return Row(path, step, nbytes, str(error))
    return Row(path, step, nbytes, "")


class Series:
    """The checkpoints of the training that holds the folder, from `hold` to `release`.

    `keep` is the number of newest checkpoints that stay.
    """

    def __init__(self, directory: str | Path, keep: int) -> None:
        self.directory, self._keep = user_path(directory, CheckpointError), keep
        self._held = ExitStack()
        self._newest: Checkpoint | None = None

    def hold(self) -> Checkpoint | None:
        """Make the folder, keep other trainings away from it, and return the newest valid
        checkpoint. Raises `CheckpointError`; then nothing is held."""
        where = self.directory
        with ExitStack() as held:
            try:
                held.enter_context(durable.made(where))
                held.enter_context(durable.locked(where))
            except BlockingIOError as error:
                raise CheckpointError(
                    f"another training, or another pipeline of this process, saves into {where}: "
                    "end or close it, or give another folder"
                ) from error
            except OSError as error:
                raise CheckpointError(
                    f"no checkpoint can be saved in {where}: {error.strerror or error}; give "
                    "another folder"
                ) from error
            self._newest = load(where) if checkpoints(where) else None
            self._held = held.pop_all()
        return self._newest

    def release(self) -> None:
        """Let other trainings save into the folder."""
        self._held.close()

    def save(self, tensors: Mapping[str, Mapping[str, Array]], manifest: Mapping[str, Any]) -> Path:
        """Write a checkpoint, read it again, remove all but the newest, and return its folder.

        A tensor that has not changed since the newest checkpoint is not written.

        Checkpoints of later steps are of a training that was given up; they are removed as well.
        Raises `CheckpointError`; then nothing was removed.
        """
        step = manifest["step"]
        folder = self.directory / f"step-{step:08}"
        earlier, self._newest = self._newest, None
        try:
            save(folder, tensors, manifest, earlier)
            self._newest = read(folder)
        except CheckpointError:
            if earlier is not None:
                assert earlier.directory is not None  # it was read
                with suppress(CheckpointError):  # the earlier one may be damaged
                    self._newest = read(earlier.directory)
            raise
        try:
            durable.sync(self.directory)
            kept = 0
            for number, path in sorted(_steps(self.directory), reverse=True):
                kept += number <= step and (path / MANIFEST).exists()
                if number > step or kept > self._keep or not (path / MANIFEST).exists():
                    remove(path)
        except OSError as error:
            raise CheckpointError(
                f"{folder} is saved, but an earlier checkpoint cannot be removed: {error}; give "
                "write access to its folder"
            ) from error
        return folder


def _steps(directory: Path) -> list[tuple[int, Path]]:
    """Return the sub-folders of checkpoints, complete or not, each with its step."""
    try:
        names = os.listdir(directory)
    except OSError:  # `read` will name it
        return []
    return [
        (int(match[1]), directory / name) for name in names if (match := _FOLDER.fullmatch(name))
    ]


def _step_of(directory: Path) -> int:
    try:
        return read_manifest(directory / MANIFEST).step
    except CheckpointError:
        return -1
