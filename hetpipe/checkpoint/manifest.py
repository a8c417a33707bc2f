"""`manifest.json`: what a checkpoint consists of, with a checksum of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from reprlib import repr
from typing import Any

from hetpipe import __version__
from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.errors import CheckpointError

VERSION = 1
ROLES = (PARAM, BUFFER, STATE)
CURE = "copy the checkpoint again from where it is whole, or load another"

_KEYS = {"version": int, "hetpipe": str, "step": int, "values": dict, "files": dict}
_FILE_KEYS = {"name": str, "nbytes": int, "sha256": str, "tensors": int}


@dataclass(frozen=True)
class TensorFile:
    """A role's file in the checkpoint's folder; `tensors` is how many it holds."""

    name: str
    nbytes: int
    sha256: str
    tensors: int


@dataclass(frozen=True)
class Manifest:
    """`values`: the caller's, without the step. `files`: by role."""

    step: int
    values: dict[str, Any]
    files: dict[str, TensorFile]

    def to_bytes(self) -> bytes:
        """What `read_manifest` reads. Raises `CheckpointError` for too deep a nesting."""
        files = {role: asdict(file) for role, file in self.files.items()}
        return _render(
            {
                "version": VERSION,
                "hetpipe": __version__,
                "step": self.step,
                "values": self.values,
                "files": files,
            }
        )


def file_name(role: str, step: int, sha256: str) -> str:
    """A name for one content only, so that no file is ever written over by another."""
    return f"{role}-{step:08}-{sha256[:16]}.safetensors"


def check_values(values: Mapping[str, Any]) -> None:
    """Raises `CheckpointError` for what JSON would not give back as it is, or without a step."""
    for key, value in values.items():
        try:
            same = isinstance(key, str) and json.loads(json.dumps(value, allow_nan=False)) == value
        except (TypeError, ValueError, RecursionError):
            same = False
        if not same:
            raise CheckpointError(
                f"the manifest's {key!r} is {repr(value)}, which JSON would not give back; "
                "use None, bool, int, finite float, str, list, and dict with str keys"
            )
    step = values.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise CheckpointError(f"the manifest's 'step' is {step!r}; give the number of steps done")


def read_manifest(path: Path) -> Manifest:
    """The manifest at `path`.

    Raises `CheckpointError` if there is none, if it is not what was saved, for another version,
    and for a key that is unknown, missing or of a wrong type.
    """
    try:
        raw = path.read_bytes()
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
    if content.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {content.get('version')!r}, this hetpipe reads {VERSION}; "
            f"load it with hetpipe {content.get('hetpipe')}"
        )
    content.pop("sha256", None)
    if _render(content) != raw:
        raise altered
    _check_keys(content, _KEYS, str(path))
    files = {}
    for role, entry in content["files"].items():
        _check_keys(entry, _FILE_KEYS, f"{path}: the file of {role!r}")
        file = TensorFile(**entry)
        name = file_name(role, content["step"], file.sha256)
        if role not in ROLES or file.name != name:
            raise CheckpointError(f"{path}: the file of {role!r} is {file.name!r}, not {name!r}")
        files[role] = file
    return Manifest(content["step"], content["values"], files)


def _check_keys(data: Any, kinds: Mapping[str, type], what: str) -> None:
    if not isinstance(data, dict):
        raise CheckpointError(f"{what} is {repr(data)}, not an object")
    for key in data:
        if key not in kinds:
            raise CheckpointError(f"{what} has an unknown key {key!r}; known: {', '.join(kinds)}")
    for key, kind in kinds.items():
        if key not in data:
            raise CheckpointError(f"{what} lacks the key {key!r}")
        if not isinstance(data[key], kind):
            raise CheckpointError(
                f"{what}: {key} is {repr(data[key])}, it should be of type {kind.__name__}"
            )


def _render(content: Mapping[str, Any]) -> bytes:
    """`content` behind the checksum of its own JSON."""
    try:
        sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps({"sha256": sha256, **content}, indent=1).encode()
    except RecursionError as error:
        raise CheckpointError("the manifest is nested too deeply; make it flatter") from error
