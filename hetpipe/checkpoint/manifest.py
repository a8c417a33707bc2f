"""`manifest.json`: the list of a checkpoint's files, with a checksum of the list itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from hetpipe.capture.program import BUFFER, PARAM, STATE
from hetpipe.checkpoint.tensors import Array, Outline, Tensors
from hetpipe.errors import CheckpointError
from hetpipe.files import open_regular, read_bytes
from hetpipe.records import Count, Source
from hetpipe.words import short

VERSION = 1
ROLES = (PARAM, BUFFER, STATE)
CURE = "copy the checkpoint again from an intact copy, or load another checkpoint"


class FormatError(CheckpointError):
    """A checkpoint is of a version that this hetpipe does not read."""


@dataclass(frozen=True)
class TensorFile:
    """The file of a role in the checkpoint's folder; `tensors` is the number of its tensors."""

    name: str
    nbytes: Count
    sha256: str
    tensors: Count


@dataclass(frozen=True)
class Manifest:
    """The content of `manifest.json`, without the format's version and the checksum.

    `values` are the caller's values except for the step; `files` has the file of each role.
    """

    hetpipe: str
    step: Count
    values: dict[str, Any]
    files: dict[str, TensorFile]

    def to_bytes(self) -> bytes:
        """Return the bytes of the file. Raises `CheckpointError` for values nested too deeply."""
        files = {role: asdict(file) for role, file in self.files.items()}
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
    if content.get("version") != VERSION:
        raise FormatError(
            f"{path} has version {short(content.get('version'))}, this hetpipe reads {VERSION}; "
            f"load it with hetpipe {str(content.get('hetpipe'))[:20]}"
        )
    content.pop("sha256", None)
    if _render(content) != raw:
        raise altered
    source = Source("the manifest", CheckpointError, str(path))
    record = source.versioned(Manifest, content, VERSION)
    for role, file in record.files.items():
        if role not in ROLES:
            raise source.fault(("files", role), f"is no role; the roles are {', '.join(ROLES)}")
        if not re.fullmatch("[0-9a-f]{64}", file.sha256):
            why = f"is {short(file.sha256)}, it should be 64 hexadecimal digits"
            raise source.fault(("files", role, "sha256"), why)
        name = file_name(role, record.step, file.sha256)
        if file.name != name:
            raise source.fault(("files", role, "name"), f"is {short(file.name)}, not {name!r}")
    return record


def _render(content: Mapping[str, Any]) -> bytes:
    """Return `content` as JSON, with a checksum in front."""
    try:
        sha256 = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        return json.dumps({"sha256": sha256, **content}, indent=1).encode()
    except RecursionError as error:
        raise CheckpointError("the manifest is nested too deeply; make it flatter") from error


DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The dtypes that a file can contain: numpy's names, each with safetensors' name."""
_NAMES = {theirs: name for name, theirs in DTYPES.items()}


def check_tensors(tensors: Mapping[str, Tensors]) -> None:
    """Raise `CheckpointError` for a role, a name or a dtype that cannot be stored."""
    for role, named in tensors.items():
        if role not in ROLES:
            raise CheckpointError(f"unknown role {role!r}; a checkpoint has {', '.join(ROLES)}")
        for name, (_, dtype) in named.outlines.items():
            if name == "__metadata__":
                raise CheckpointError(f"safetensors reserves the name {name!r}; rename the {role}")
            if dtype.name not in DTYPES:
                raise CheckpointError(
                    f"{role} {name!r} is of type {dtype}, which cannot be stored; "
                    f"use one of {', '.join(DTYPES)}"
                )


def file_parts(tensors: Tensors) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces: the header's length, the header, the data.

    Tensors with wide elements come first, so that all tensors are aligned. The library's writer is
    not used: it needs all tensors at once and a second copy of them, or temporary files that a
    killed process would leave behind.
    """
    ordered = sorted(tensors.outlines.items(), key=lambda item: -item[1].dtype.itemsize)
    header, end = {}, 0
    for name, outline in ordered:
        start, end = end, end + outline.nbytes
        code = DTYPES[outline.dtype.name]
        header[name] = {"dtype": code, "shape": outline.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in tensors.each([name for name, _ in ordered]):
        little_endian = np.asarray(array, array.dtype.newbyteorder("<"))
        yield little_endian.reshape(-1).view(np.uint8).data


def open_tensors(path: Path, file: TensorFile) -> Tensors:
    """Check every byte of a file, and return its tensors. The open file serves later reads, even if
    it is removed. Raises `CheckpointError` for a missing or changed file, then and later."""
    try:
        content = _Content(path)
        nbytes = os.fstat(content.fileno()).st_size
        if nbytes != file.nbytes:
            raise CheckpointError(f"{path} has {nbytes} bytes, not the {file.nbytes} saved; {CURE}")
        sha256 = content.sha256()
        if sha256 != file.sha256:
            raise CheckpointError(
                f"{path} was altered: its SHA-256 is {sha256}, not {file.sha256}; {CURE}"
            )
        with safe_open(path, "np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            outlines = {
                name: Outline(tuple(part.get_shape()), np.dtype(_NAMES[part.get_dtype()]))
                for name, part in slices.items()
            }
        begins = content.begins()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {CURE}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; {CURE}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}; {CURE}") from error
    if len(outlines) != file.tensors:
        raise CheckpointError(f"{path} has {len(outlines)} tensors, not {file.tensors}; {CURE}")
    return Tensors(outlines, lambda names: (content.tensor(begins[n], outlines[n]) for n in names))


class _Content:
    """An open file of tensors.

    It is read, not mapped into memory: there a fault of the disk would kill this process.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_regular(path, None)
        weakref.finalize(self, self._file.close)

    def fileno(self) -> int:
        return self._file.fileno()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        while part := self._file.read(2**20):
            digest.update(part)
        return digest.hexdigest()

    def begins(self) -> dict[str, int]:
        """Return the offset of each tensor, of a valid file."""
        self._file.seek(0)
        length = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(length))
        header.pop("__metadata__", None)
        return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items()}

    def tensor(self, begin: int, outline: Outline) -> Array:
        """Read a tensor. Raises `CheckpointError`."""
        array = np.empty(outline.shape, outline.dtype.newbyteorder("<"))
        rest = array.reshape(-1).view(np.uint8).data
        try:
            while rest:  # the system may read less than asked for
                count = os.preadv(self.fileno(), [rest], begin)
                if count == 0:
                    raise OSError("it has become shorter")
                rest, begin = rest[count:], begin + count
        except OSError as error:
            raise CheckpointError(f"cannot read {self._path}: {error}; {CURE}") from error
        return array.astype(outline.dtype, copy=False)
