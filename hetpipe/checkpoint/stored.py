"""Files of tensors in the format safetensors, which are checked and read without other tensors."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from hetpipe.checkpoint.manifest import CURE, ROLES, TensorFile
from hetpipe.checkpoint.tensors import Array, Outline, Tensors
from hetpipe.errors import CheckpointError
from hetpipe.files import open_regular

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The dtypes that a file can contain: numpy's names, each with safetensors' name."""
_NAMES = {theirs: name for name, theirs in DTYPES.items()}
_PART_NBYTES = 1 << 20


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
        yield data_of(array)


def data_of(array: Array) -> memoryview:
    """Return a tensor's bytes as a file has them."""
    little_endian = np.asarray(array, array.dtype.newbyteorder("<"))
    return little_endian.reshape(-1).view(np.uint8).data


class StoredTensors(Tensors):
    """The tensors of a file, which is `file` in the manifest."""

    def __init__(
        self,
        file: TensorFile,
        content: _Content,
        outlines: Mapping[str, Outline],
        begins: Mapping[str, int],
    ) -> None:
        super().__init__(
            outlines, lambda names: (content.tensor(begins[n], outlines[n]) for n in names)
        )
        self.file, self.path = file, content.path
        self._content, self._begins = content, begins

    def holds(self, name: str, array: Array) -> bool:
        """Whether the file has this very tensor, bit for bit. Raises `CheckpointError`."""
        if self.outlines.get(name) != Outline(array.shape, array.dtype):
            return False
        return self._content.holds(self._begins[name], data_of(array))


def open_tensors(path: Path, file: TensorFile) -> StoredTensors:
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
    return StoredTensors(file, content, outlines, begins)


class _Content:
    """An open file of tensors.

    It is read, not mapped into memory: there a fault of the disk would kill this process.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._file = path, open_regular(path, None)
        weakref.finalize(self, self._file.close)

    def fileno(self) -> int:
        return self._file.fileno()

    def sha256(self) -> str:
        digest = hashlib.sha256()
        while part := self._file.read(_PART_NBYTES):
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
        self._read(begin, array.reshape(-1).view(np.uint8).data)
        return array.astype(outline.dtype, copy=False)

    def holds(self, begin: int, data: memoryview) -> bool:
        """Whether these bytes follow `begin`. The first difference ends the comparison."""
        for lo in range(0, len(data), _PART_NBYTES):
            part = data[lo : lo + _PART_NBYTES]
            there = np.empty(len(part), np.uint8)
            self._read(begin + lo, there.data)
            if not np.array_equal(there, np.frombuffer(part, np.uint8)):
                return False
        return True

    def _read(self, begin: int, rest: memoryview) -> None:
        """Read into memory. Raises `CheckpointError`."""
        try:
            while rest:  # the system may read less than asked for
                count = os.preadv(self.fileno(), [rest], begin)
                if count == 0:
                    raise OSError("it has become shorter")
                rest, begin = rest[count:], begin + count
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error}; {CURE}") from error
