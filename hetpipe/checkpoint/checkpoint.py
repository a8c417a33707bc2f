"""Saves and loads checkpoints; at every moment the folder contains a complete checkpoint.

A checkpoint is a folder with one safetensors file per role and `manifest.json`, which names these
files. A file's name contains its checksum, so new files never overwrite the old files. When all new
files are on the disk, a save replaces the manifest in one rename, and then removes the old files.
However a save ends, the folder has the previous checkpoint or the new checkpoint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetpipe import __version__
from hetpipe.checkpoint import durable
from hetpipe.checkpoint.manifest import (
    ROLES,
    Manifest,
    TensorFile,
    check_tensors,
    check_values,
    file_name,
    file_parts,
    open_tensors,
    read_manifest,
)
from hetpipe.checkpoint.tensors import Array, Tensors
from hetpipe.errors import CheckpointError
from hetpipe.files import user_path

MANIFEST = "manifest.json"
_OURS = re.compile(
    r"({0})-\d{{8,}}-[0-9a-f]{{16}}\.safetensors|\.({0}|manifest)\.partial".format("|".join(ROLES))
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint. Tensors, by role and name, are read from their file when they
    are needed."""

    manifest: dict[str, Any]
    tensors: Mapping[str, Mapping[str, Array]]
    directory: Path | None = None  # the folder that the checkpoint was read from


def save(
    directory: str | Path, tensors: Mapping[str, Mapping[str, Array]], manifest: Mapping[str, Any]
) -> None:
    """Write a checkpoint into `directory`; it replaces the present checkpoint.

    `tensors`: by role (param, buffer, state), then by the model's names; a state has a name such as
    "momentum/fc.weight". Give a bfloat16 tensor as its int16 view. `Tensors` are read and written
    one after another. `manifest`: JSON values, among them "step", the number of steps done.

    Raises `CheckpointError`, before anything is written, for values that the files cannot contain.
    Raises `CheckpointError` as well if the folder cannot be written to, or if another process or
    thread is saving into it. After an error the previous checkpoint stays, without new files or
    folders.
    """
    directory = user_path(directory, CheckpointError)
    check_values(manifest)
    roles = {role: Tensors.of(named) for role, named in tensors.items()}
    check_tensors(roles)
    values = dict(manifest)
    step = values.pop("step")
    _check_depth(Manifest(__version__, step, values, {}))
    try:
        with durable.made(directory), durable.locked(directory):
            _sweep(directory)
            before: frozenset[str] | None = frozenset(os.listdir(directory))
            try:
                files = {role: _save_role(directory, role, step, roles[role]) for role in roles}
                durable.sync(directory)
                partial = directory / ".manifest.partial"
                manifest_file = Manifest(__version__, step, values, files)
                durable.write(partial, [manifest_file.to_bytes()])
                os.replace(partial, directory / MANIFEST)
                before = None  # the manifest names the new files
                durable.sync(directory)
            finally:
                _sweep(directory, before)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{directory}: another process or thread is saving a checkpoint there, so "
            "this checkpoint is not saved; give each training a separate folder, or "
            "save again later"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot save a checkpoint in {directory}: {error}; make room or give write access "
            "there, or choose another folder"
        ) from error


def read(directory: Path) -> Checkpoint:
    """Open the checkpoint of this very folder, and check every byte against its checksum.

    If another process saves there meanwhile, the new checkpoint is read. Raises `CheckpointError`,
    with the file's name, if there is no checkpoint, if a file is missing, truncated or altered, and
    for another version of the format.
    """
    manifest = read_manifest(directory / MANIFEST)
    while True:
        try:
            files = manifest.files.items()
            tensors = {role: open_tensors(directory / file.name, file) for role, file in files}
        except CheckpointError:
            before, manifest = manifest, read_manifest(directory / MANIFEST)
            if manifest == before:
                raise
        else:
            return Checkpoint({"step": manifest.step, **manifest.values}, tensors, directory)


def remove(directory: Path) -> None:
    """Remove a checkpoint, and its folder if nothing else is in it. The manifest goes first, so
    that at every moment the checkpoint is complete or none."""
    (directory / MANIFEST).unlink(missing_ok=True)
    durable.sync(directory)
    for path in _ours(directory):
        path.unlink()
    with suppress(OSError):  # it has files of others
        directory.rmdir()


def _check_depth(manifest: Manifest) -> None:
    """Raise `CheckpointError` for a manifest too deep for the stack, as deep in it as a load."""
    manifest.to_bytes()


def _save_role(directory: Path, role: str, step: int, tensors: Tensors) -> TensorFile:
    partial = directory / f".{role}.partial"
    nbytes, sha256 = durable.write(partial, file_parts(tensors))
    file = TensorFile(file_name(role, step, sha256), nbytes, sha256, len(tensors))
    os.replace(partial, directory / file.name)
    return file


def _sweep(directory: Path, before: Collection[str] | None = None) -> None:
    """Remove files of replaced or interrupted saves: our files that the manifest does not name.

    If the manifest cannot be read, remove our files that are not in `before`; if `before` is None
    as well, remove nothing.
    """
    try:
        manifest = read_manifest(directory / MANIFEST)
        kept = {file.name for file in manifest.files.values()}
    except CheckpointError:
        if before is None:
            return
        kept = set(before)
    for path in _ours(directory):
        if path.name not in kept:
            path.unlink()


def _ours(directory: Path) -> list[Path]:
    """Return the files of saves, except for the manifest."""
    return [path for path in directory.iterdir() if _OURS.fullmatch(path.name)]
