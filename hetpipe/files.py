"""Writes result files so that a reader never sees half of one."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hetpipe.errors import HetpipeError


def write_beside(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file in the same folder, then rename it to `path`. Makes the folder.

    Raises `HetpipeError` if the place cannot be written to.
    """
    beside = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        beside.replace(path)
    except OSError as error:
        raise HetpipeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        beside.unlink(missing_ok=True)


def dump_json(data: Any) -> str:
    """JSON with an end of line. Infinite and missing numbers become null, which JSON can say."""
    return json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"


def write_json(path: Path, data: Any) -> None:
    """Write `data` as JSON to `path`. Raises `HetpipeError`."""
    write_beside(path, lambda beside: beside.write_text(dump_json(data), encoding="utf-8"))


def _finite(data: Any) -> Any:
    if isinstance(data, Mapping):
        return {str(key): _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
