"""`manifest.json`: the list of a checkpoint's files, with a checksum of the list itself."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.errors import CheckpointError
from hetpipe.files import read_bytes
from hetpipe.records import Count, Source
from hetpipe.words import short

VERSION = 2
ROLES = (PARAM, BUFFER, STATE)
CURE = "copy the checkpoint again from an intact copy, or load another checkpoint"


class FormatError(CheckpointError):
    """A checkpoint is of a version that this hetpipe does not read."""


@dataclass(frozen=True)
class TensorFile:
    """A file of tensors in the checkpoint's folder; `tensors` is the number of its tensors."""

    name: str
    nbytes: Count
    sha256: str
    tensors: Count


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`, without the format's version and the checksum.

    `values` are the caller's values except for the step; `files` has the files of each role.
    """

    hetpipe: str
    step: Count
    values: dict[str, Any]
    files: dict[str, tuple[TensorFile, ...]]

    def to_bytes(self) -> bytes:
        """Return the bytes of the file. Raises `CheckpointError` for values nested too deeply."""
        files = {role: [asdict(file) for file in files] for role, files in self.files.items()}
        return _render({"version": VERSION, **vars(self), "files": files})


def file_name(role: str, step: int, sha256: str) -> str:
    """Return a name that depends on the content, so that no file overwrites a different file."""
    return f"{role}-{step:08}-{sha256[:16]}.safetensors"


def check_values(values: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for values that JSON would change and for a missing or bad step."""
    for key, value in values.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise CheckpointError(
                f"the manifest's {key!r} is {short(value)}, which JSON would change; "
                "use None, bool, int, finite float, str, list, and dict with str keys"
            )
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"the manifest's 'step' is {step!r}; give the number of steps done")


def read_manifest(path: Path) -> Manifest:
    """Read the manifest at `path`.

    Raises `CheckpointError` for a manifest that is missing, altered or of another version, and for
    a key that is unknown, missing or of a wrong type.
    """
    try:
        raw = read_bytes(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(
            f"{path} is missing; give the folder that a checkpoint was saved into"
        ) from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; {CURE}") from error
    altered = CheckpointError(f"{path} was truncated or altered; {CURE}")
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise altered from error
    if not isinstance(content, dict):
        raise altered
    version = content.get("version")
    if type(version) is not int or version not in (1, VERSION):
        raise FormatError(
            f"{path} has version {short(version)}, this hetpipe reads 1 and {VERSION}; "
            f"load it with hetpipe {str(content.get('hetpipe'))[:20]}"
        )
    content.pop("sha256", None)
    if _render(content) != raw:
        raise altered
    if version == 1 and isinstance(files := content.get("files"), dict):
        content["files"] = {role: [file] for role, file in files.items()}
    source = Source("the manifest", CheckpointError, str(path))
    record = source.versioned(Manifest, {**content, "version": VERSION}, VERSION)
    for role, of_role in record.files.items():
        if role not in ROLES:
            raise source.fault(("files", role), f"is no role; the roles are {', '.join(ROLES)}")
        for number, file in enumerate(of_role):
            place = ("files", role, number)
            if not re.fullmatch("[0-9a-f]{64}", file.sha256):
                why = f"is {short(file.sha256)}, it should be 64 hexadecimal digits"
                raise source.fault((*place, "sha256"), why)
            name = file_name(role, record.step, file.sha256)
            if file.name != name:
                raise source.fault((*place, "name"), f"is {short(file.name)}, not {name!r}")
    return record


def _render(content: Mapping[str, Any]) -> bytes:
    """Return `content` as JSON, with a checksum in front."""
    try:
        sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps({"sha256": sha256, **content}, indent=1).encode()
    except RecursionError as error:
        raise CheckpointError("the manifest is nested too deeply; make it flatter") from error
