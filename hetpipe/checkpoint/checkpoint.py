"""Saves and loads checkpoints; at every moment the folder contains a complete checkpoint.

A checkpoint is a folder with safetensors files for each role and `manifest.json`, which names these
files. A file's name contains its checksum, so new files never overwrite the old files. When all new
files are on the disk, a save replaces the manifest in one rename, and then removes the old files.
However a save ends, the folder has the previous checkpoint or the new checkpoint.

Tensors that have not changed since an earlier checkpoint need not be written: a file all of whose
tensors are unchanged becomes a hard link. Each file is wholly valid, so a file with changed and
unchanged tensors is divided into two, and the second save after that links the unchanged half.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hetpipe import __version__
from hetpipe.capture.program import BUFFER, PARAM
from hetpipe.checkpoint import durable
from hetpipe.checkpoint.manifest import (
    ROLES,
    Manifest,
    TensorFile,
    check_values,
    file_name,
    read_manifest,
)
from hetpipe.checkpoint.stored import StoredTensors, check_tensors, file_parts, open_tensors
from hetpipe.checkpoint.tensors import Array, Tensors
from hetpipe.errors import CheckpointError
from hetpipe.files import user_path

MANIFEST = "manifest.json"
INDEX = "model.safetensors.index.json"
"""The file of each parameter and buffer, for programs that load models in several files."""
_OURS = re.compile(
    r"({0})-\d{{8,}}-[0-9a-f]{{16}}\.safetensors|\.({0}|manifest|index)\.partial".format(
        "|".join(ROLES)
    )
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The content of a checkpoint. Tensors, by role and name, are read from their file when they
    are needed."""

    manifest: dict[str, Any]
    tensors: Mapping[str, Mapping[str, Array]]
    directory: Path | None = None  # the folder that the checkpoint was read from
    files: Mapping[str, Sequence[StoredTensors]] = field(default_factory=dict)
    """The files of each role."""


def save(
    directory: str | Path,
    tensors: Mapping[str, Mapping[str, Array]],
    manifest: Mapping[str, Any],
    earlier: Checkpoint | None = None,
) -> None:
    """Write a checkpoint into `directory`; it replaces the present checkpoint.

    `tensors`: by role (param, buffer, state), then by the model's names; a state has a name such as
    "momentum/fc.weight". Give a bfloat16 tensor as its int16 view. `Tensors` are read and written
    one after another. `manifest`: JSON values, among them "step", the number of steps done.
    Files of tensors that are unchanged since the checkpoint `earlier` become links to its files;
    then each of `tensors` is read twice.

    Raises `CheckpointError`, before anything is written, for values that the files cannot contain,
    and if another program's index of a model is in the folder. Raises `CheckpointError` as well if
    the folder cannot be written to, or if another process or thread is saving into it. After an
    error the previous checkpoint stays, without new files or folders.
    """
    directory = user_path(directory, CheckpointError)
    check_values(manifest)
    roles = {role: Tensors.of(named) for role, named in tensors.items()}
    check_tensors(roles)
    values = dict(manifest)
    step = values.pop("step")
    _check_depth(Manifest(__version__, step, values, {}))
    _check_index(directory)
    try:
        with durable.made(directory), durable.locked(directory):
            _sweep(directory)
            before: frozenset[str] | None = frozenset(os.listdir(directory))
            try:
                links = {} if earlier is None else earlier.files
                parts = {
                    role: _save_role(directory, role, step, roles[role], links.get(role, ()))
                    for role in roles
                }
                durable.write(directory / ".index.partial", [_index(parts)])
                durable.sync(directory)
                partial = directory / ".manifest.partial"
                files = {role: tuple(file for file, _ in parts[role]) for role in parts}
                manifest_file = Manifest(__version__, step, values, files)
                durable.write(partial, [manifest_file.to_bytes()])
                os.replace(partial, directory / MANIFEST)
                os.replace(directory / ".index.partial", directory / INDEX)
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


def check_folder(directory: Path | None) -> None:
    """Raise `CheckpointError` if `save` could not make the folder, or would replace another
    program's index; None is no folder. Leaves no new folder.

    A command calls this before its work, so that the work is not lost.
    """
    if directory is None:
        return
    directory = user_path(directory, CheckpointError)
    _check_index(directory)
    try:
        with durable.made(directory):
            raise InterruptedError  # so that `made` removes the new folders
    except InterruptedError:
        return
    except OSError as error:
        raise CheckpointError(
            f"cannot save a checkpoint in {directory}: {error.strerror or error}; give another "
            "folder"
        ) from error


def _check_index(directory: Path) -> None:
    """Raise `CheckpointError` if another program's index is in the folder."""
    if (directory / INDEX).exists() and not _is_ours(directory / INDEX):
        raise CheckpointError(
            f"{directory / INDEX} is of another program, and a checkpoint would replace it; give "
            "another folder"
        )


def read(directory: Path) -> Checkpoint:
    """Open the checkpoint of this very folder, and check every byte against its checksum.

    If another process saves there meanwhile, the new checkpoint is read. Raises `CheckpointError`,
    with the file's name, if there is no checkpoint, if a file is missing, truncated or altered, and
    for another version of the format.
    """
    manifest = read_manifest(directory / MANIFEST)
    while True:
        try:
            files = {
                role: [open_tensors(directory / file.name, file) for file in files]
                for role, files in manifest.files.items()
            }
        except CheckpointError:
            before, manifest = manifest, read_manifest(directory / MANIFEST)
            if manifest == before:
                raise
        else:
            tensors = {role: Tensors.joined(parts) for role, parts in files.items()}
            values = {"step": manifest.step, **manifest.values}
            return Checkpoint(values, tensors, directory, files)


def remove(directory: Path) -> None:
    """Remove a checkpoint, and its folder if nothing else is in it. The manifest goes before the
    tensors, so that at every moment the checkpoint is complete or none."""
    (directory / INDEX).unlink(missing_ok=True)
    (directory / MANIFEST).unlink(missing_ok=True)
    durable.sync(directory)
    for path in _ours(directory):
        path.unlink()
    with suppress(OSError):  # it has files of others
        directory.rmdir()


def _check_depth(manifest: Manifest) -> None:
    """Raise `CheckpointError` for a manifest too deep for the stack, as deep in it as a load."""
    manifest.to_bytes()


def _save_role(
    directory: Path, role: str, step: int, tensors: Tensors, earlier: Sequence[StoredTensors]
) -> list[tuple[TensorFile, Tensors]]:
    """Write the files of a role, or link earlier files; return them with their tensors."""
    partial = directory / f".{role}.partial"
    files, unchanged = list[tuple[TensorFile, Tensors]](), set[str]()
    for stored in earlier:
        same = {n for n in stored if n in tensors and stored.holds(n, tensors[n])}
        if len(same) == len(stored) and _link(stored.path, partial):
            file = replace(stored.file, name=file_name(role, step, stored.file.sha256))
            os.replace(partial, directory / file.name)
            files.append((file, stored))
            tensors = tensors.only(tensors.keys() - same)
        else:
            unchanged |= same
    changed = tensors.only(tensors.keys() - unchanged)
    for group in (changed, tensors.only(unchanged)):
        if group or not (files or tensors):
            nbytes, sha256 = durable.write(partial, file_parts(group))
            file = TensorFile(file_name(role, step, sha256), nbytes, sha256, len(group))
            os.replace(partial, directory / file.name)
            files.append((file, group))
    return files


def _index(parts: Mapping[str, Sequence[tuple[TensorFile, Tensors]]]) -> bytes:
    """Return the content of `INDEX`."""
    model = [part for role in (PARAM, BUFFER) for part in parts.get(role, ())]
    nbytes = sum(outline.nbytes for _, group in model for outline in group.outlines.values())
    files = {name: file.name for file, group in model for name in group}
    content = {"metadata": {"total_size": nbytes}, "weight_map": files}
    return json.dumps(content, indent=2).encode()


def _is_ours(index: Path) -> bool:
    """Whether a save wrote this file of the name `INDEX`."""
    try:
        files = json.loads(index.read_bytes())["weight_map"].values()
        return all(_OURS.fullmatch(file) for file in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _link(path: Path, target: Path) -> bool:
    """Make a hard link. Return False if the file system refuses, or if the file is gone."""
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:
        return False
    return True


def _sweep(directory: Path, before: Collection[str] | None = None) -> None:
    """Remove files of replaced or interrupted saves: our files that the manifest does not name.

    If the manifest cannot be read, remove our files that are not in `before`; if `before` is None
    as well, remove nothing.
    """
    try:
        manifest = read_manifest(directory / MANIFEST)
        kept = {file.name for files in manifest.files.values() for file in files}
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
