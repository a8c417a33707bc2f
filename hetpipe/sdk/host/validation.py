"""Checks of the information that a backend gives about itself and its devices."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Buffer, Chunk, Device, Event, Group
from hetpipe.sdk.info import (
    API_VERSION,
    DTYPE_NBYTES,
    KINDS,
    OLDEST_API_VERSION,
    DeviceInfo,
)
from hetpipe.words import short

Ran = tuple[Sequence[Buffer], Event, Sequence[Chunk]]
"""The outputs of a run, its event, and the chunks."""

_NAME = re.compile(r"[a-z][a-z0-9_-]*")


def check_class(backend: Any, source: str) -> type[Backend]:
    """Return `backend` if it is a subclass of `Backend`.

    Raises `BackendError`, whose text begins with `source`, for anything else, for a name that a
    backend cannot have, and for an unsupported version of the contract.
    """
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise BackendError(f"{source} is not a Backend class; derive it from sdk.Backend")
    check_name(getattr(backend, "name", None), source)
    if backend.api_version not in range(OLDEST_API_VERSION, API_VERSION + 1):
        raise BackendError(
            f"{source} was written for version {backend.api_version} of the backend contract, but "
            f"this hetpipe runs versions {OLDEST_API_VERSION} to {API_VERSION}: install a matching "
            "version of the backend or of hetpipe"
        )
    return backend


def check_name(name: Any, source: str) -> None:
    """Raise `BackendError`, beginning with `source`, if a backend cannot have that name."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise BackendError(
            f"{source} has the name {name!r}; a name is a lower-case letter, then lower-case "
            "letters, digits, - and _"
        )


def check_devices(name: str, infos: Any) -> list[DeviceInfo]:
    """Return the result of `discover`. Raises `BackendError` with its first fault."""
    if not isinstance(infos, (list, tuple)):
        raise BackendError(
            f"backend {name!r}: discover returns {type(infos).__name__}, not a list of DeviceInfo"
        )
    for info in infos:
        if not isinstance(info, DeviceInfo):
            raise BackendError(
                f"backend {name!r}: the list from discover contains "
                f"{type(info).__name__} {info!r}, but it must contain only "
                "DeviceInfo"
            )
        problem = _wrong_type(info, "device") or _wrong_value(name, info)
        if problem:
            raise BackendError(f"backend {name!r}: {problem}")
    ids = [info.id for info in infos]
    for device_id in ids:
        if ids.count(device_id) > 1:
            raise BackendError(f"backend {name!r}: discover returns {device_id!r} more than once")
    return list(infos)


def check_ran(device: Device, ran: Any, results: int) -> Ran:
    """Return the result of `Executable.run` for a graph with this number of results.

    Raises `BackendError`, which names backend, device, expected and returned values.
    """
    if not (isinstance(ran, tuple) and len(ran) == 3):
        raise _answered(device, "run", ran, "(outputs, event, chunks)")
    outputs, event, chunks = ran
    _check_outputs(device, "run", outputs, event, results)
    return outputs, event, chunks or ()


def check_summed(device: Device, summed: Any, terms: int) -> tuple[Sequence[Buffer], Event]:
    """Return the result of `Group.sum` for this number of terms. Raises as `check_ran` does."""
    if not (isinstance(summed, tuple) and len(summed) == 2):
        raise _answered(device, "the group's sum", summed, "(outputs, event)")
    _check_outputs(device, "the group's sum", *summed, terms)
    return summed


def _check_outputs(device: Device, method: str, outputs: Any, event: Any, results: int) -> None:
    if not isinstance(outputs, (list, tuple)):
        raise _answered(device, method, outputs, "a list of Buffer as outputs")
    if len(outputs) != results:
        raise _answered(
            device, method, f"{len(outputs)} outputs", f"{results}: one for each result"
        )
    if not all(issubclass(kind, Buffer) for kind in set(map(type, outputs))):
        number, output = next((n, o) for n, o in enumerate(outputs) if not isinstance(o, Buffer))
        raise _answered(device, method, f"{short(output)} as output {number}", "a Buffer")
    if not isinstance(event, Event):
        raise _answered(device, method, f"{short(event)} as its event", "an Event")


def join_group(device: Device, folder: Path, rank: int, size: int) -> Group | None:
    """Let a device join a group, if it can. Raises `BackendError`, as `check_ran` does."""
    group: Any = device.join_group(folder, rank, size)
    if group is not None and not isinstance(group, Group):
        raise _answered(device, "join_group", group, "a Group or None")
    return group


def upload(device: Device, array: np.ndarray[Any, Any]) -> tuple[Buffer, Event]:
    """Copy an array to the device. Raises `BackendError`, as `check_ran` does."""
    uploaded: Any = device.upload(array)
    if isinstance(uploaded, tuple) and len(uploaded) == 2:
        buffer, event = uploaded
        if isinstance(buffer, Buffer) and isinstance(event, Event):
            return buffer, event
    raise _answered(device, "upload", uploaded, "(Buffer, Event)")


def _answered(device: Device, method: str, answer: Any, expected: str) -> BackendError:
    """Return the error for a device's method that returns a wrong value."""
    text = answer if isinstance(answer, str) else short(answer)
    info = device.info
    return BackendError(
        f"backend {info.backend!r}: {method} of device {info.id} returns {text}, not {expected}"
    )


def _wrong_type(record: Any, owner: str) -> str:
    hints = get_type_hints(type(record))
    for field in fields(record):
        value, hint = getattr(record, field.name), hints[field.name]
        expected = get_origin(hint) or hint
        # To Python, a bool is an int.
        if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
            return (
                f"{field.name} of {owner} {getattr(record, 'id', '')!r} is {type(value).__name__} "
                f"{value!r}, not {expected.__name__}"
            )
    return ""


def _wrong_value(name: str, info: DeviceInfo) -> str:
    """Return the first fault of a description whose fields have the right types."""
    device, can = f"device {info.id!r}", info.capabilities
    prefix, _, rest = info.id.partition(":")
    if prefix != name or info.backend != name or not rest:
        return f"{device} says that its backend is {info.backend!r}; ids are {name}:name:index"
    if re.search(r"[\s#]", info.id):
        return f"{device}: an id must not contain blanks or #"
    if info.kind not in KINDS:
        return f"{device} is of kind {info.kind!r}; the kinds are {', '.join(KINDS)}"
    if info.memory_nbytes <= 0:
        return f"{device} has {info.memory_nbytes} bytes of memory; memory_nbytes must exceed 0"
    if not info.memory_domain:
        return f'{device} has no memory_domain; write "host", or an id for separate memory'
    if problem := _wrong_dtypes(info.dtypes, info.cast_dtypes):
        return f"{device} {problem}"
    problem = _wrong_type(can, "capability")
    if not problem and can.queues < 1:
        problem = f"{can.queues} queues; a device needs at least 1"
    return f"capabilities of {device}: {problem}" if problem else ""


def _wrong_dtypes(dtypes: Sequence[Any], cast_dtypes: Sequence[Any]) -> str:
    for dtype in (*dtypes, *cast_dtypes):
        if dtype not in DTYPE_NBYTES:
            return f"has the dtype {dtype!r}; dtypes are {', '.join(DTYPE_NBYTES)}"
    if "float32" not in dtypes:
        return f"has the dtypes {', '.join(dtypes) or 'none'}; every device needs float32"
    both = set(dtypes) & set(cast_dtypes)
    return f"names {', '.join(sorted(both))} in dtypes and in cast_dtypes" if both else ""
