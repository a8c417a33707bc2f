"""Writes one role's tensors as a safetensors file, and reads them with every byte checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hetpipe.checkpoint.manifest import CURE, ROLES, TensorFile
from hetpipe.errors import CheckpointError
from hetpipe.files import open_regular

Array = np.ndarray[Any, Any]

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The dtypes of a file: numpy's name and safetensors' name."""


def check_tensors(tensors: Mapping[str, Mapping[str, Array]]) -> None:
    """Raise `CheckpointError` for a role, a name or a type that cannot be stored."""
    for role, named in tensors.items():
        if role not in ROLES:
            raise CheckpointError(f"unknown role {role!r}; a checkpoint has {', '.join(ROLES)}")
        for name, array in named.items():
            if name == "__metadata__":
                raise CheckpointError(f"safetensors keeps the name {name!r}; rename that {role}")
            if array.dtype.name not in DTYPES:
                raise CheckpointError(
                    f"{role} {name!r} is of type {array.dtype}, which cannot be stored; "
                    f"use one of {', '.join(DTYPES)}"
                )


def file_parts(tensors: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file in pieces: header's length, header, data.

    Wide elements come first, so that all are aligned. The library's writer needs a second copy of
    all tensors, or temporary files that a killed process would leave.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header, end = {}, 0
    for name, array in ordered:
        start, end = end, end + array.nbytes
        code = DTYPES[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": (start, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for _, array in ordered:
        little_endian = np.asarray(array, array.dtype.newbyteorder("<"))
        yield little_endian.reshape(-1).view(np.uint8).data


def read_tensors(path: Path, file: TensorFile) -> dict[str, Array]:
    """Read the tensors in `path`. Raises `CheckpointError` if the file was changed."""
    try:
        nbytes = path.stat().st_size
        if nbytes != file.nbytes:
            raise CheckpointError(f"{path} has {nbytes} bytes, not the {file.nbytes} saved; {CURE}")
        sha256 = _sha256(path)
        if sha256 != file.sha256:
            raise CheckpointError(
                f"{path} was altered: its SHA-256 is {sha256}, not {file.sha256}; {CURE}"
            )
        tensors: dict[str, Array] = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; {CURE}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error}; {CURE}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}; {CURE}") from error
    if len(tensors) != file.tensors:
        raise CheckpointError(f"{path} has {len(tensors)} tensors, not {file.tensors}; {CURE}")
    return tensors


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open_regular(path, None) as file:
        while part := file.read(2**20):
            digest.update(part)
    return digest.hexdigest()
