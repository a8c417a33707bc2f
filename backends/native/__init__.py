"""Finds and opens the devices of vendors' C libraries; see `hetpipe_backend.h`."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetpipe import environment
from hetpipe.errors import BackendError
from hetpipe.files import path_in
from hetpipe.records import Name, Source
from hetpipe.sdk.backend import Backend, Device, Finding
from hetpipe.sdk.host.validation import check_devices
from hetpipe.sdk.info import DTYPE_NBYTES, Capabilities, DeviceInfo

if TYPE_CHECKING:
    from .probe import Answer

LIBRARIES = "HETPIPE_NATIVE"
"""Environment variable with the paths of libraries, separated as in PATH."""
_PART = re.compile(r"[a-z0-9][a-z0-9_-]*")


class LibraryWarning(UserWarning):
    """Warns that a library fails, while other libraries offer devices."""


def include_folder() -> Path:
    """Return the folder of `hetpipe_backend.h`, the graph reader and `example`, a whole library."""
    return Path(__file__).resolve().parent


@dataclass(frozen=True)
class _Options:
    """The table `[backend.native]` of a cluster file."""

    libraries: tuple[Name, ...]


class NativeBackend(Backend):
    """All devices of the libraries that the environment or the cluster file names."""

    name = "native"

    def __init__(self) -> None:
        self._configured: list[Path] = []
        self._answers: dict[Path, Answer] = {}  # each library is asked once per process
        self._warned: set[Path] = set()
        self._places: dict[str, tuple[Path, int]] = {}
        """For each device id, the path of its library and the device's number in the library."""

    def configure(self, options: Mapping[str, Any], folder: Path) -> None:
        source = Source("the options of backend native", BackendError)
        named = source.record(_Options, dict(options)).libraries
        self._configured = [_resolved(path_in(folder, text, BackendError)) for text in named]

    def discover(self) -> list[DeviceInfo]:
        infos, errors = self._devices()
        if errors and not infos:
            raise BackendError("; ".join(errors.values()))
        for path in errors.keys() - self._warned:
            self._warned.add(path)
            warnings.warn(errors[path], LibraryWarning, stacklevel=2)
        return infos

    def open(self, info: DeviceInfo) -> Device:
        from .device import NativeDevice
        from .library import loaded

        if info.id not in self._places:
            self._devices()
        if info.id not in self._places:
            raise BackendError(f"no library has device {info.id!r}; `hetpipe devices` lists all")
        path, index = self._places[info.id]
        device: Device = NativeDevice(info, loaded(path), index)
        return device

    def describe(self) -> list[Finding]:
        infos, errors = self._devices()
        if not (infos or errors):
            return [("ok", f"no vendor's library is named: put paths into {LIBRARIES}", "")]
        findings = [("ok", f"{info.id}: {info.name}, {info.driver}", "") for info in infos]
        return [*findings, *(("broken", error, "") for error in errors.values())]

    def _devices(self) -> tuple[list[DeviceInfo], dict[Path, str]]:
        """Return the devices of all working libraries, and the errors of the other libraries."""
        from .probe import ask

        paths = list(dict.fromkeys([*_from_environment(), *self._configured]))
        self._answers |= ask(path for path in paths if path not in self._answers)
        infos: list[DeviceInfo] = []
        errors: dict[Path, str] = {}
        owners: dict[str, Path] = {}
        for path in paths:
            try:
                answer = self._answers[path]
                if answer.error:
                    raise BackendError(answer.error)
                described = _infos(path, answer)
                if (owner := owners.setdefault(answer.name, path)) != path:
                    raise BackendError(f"{path} has the name {answer.name!r}, as {owner} has")
            except BackendError as error:
                errors[path] = str(error)
                continue
            infos += described
            self._places |= {info.id: (path, i) for i, info in enumerate(described)}
        return infos, errors


def _from_environment() -> Iterable[Path]:
    return map(_resolved, environment.paths(LIBRARIES, BackendError))


def _resolved(path: Path) -> Path:
    return Path(os.path.abspath(path))


def _infos(path: Path, answer: Answer) -> list[DeviceInfo]:
    """Return the descriptions of a library's devices. Raises `BackendError` if one is invalid."""
    if not _PART.fullmatch(answer.name):
        raise BackendError(f"{path} has the name {answer.name!r}; {_RULE}")
    numbers: dict[str, int] = {}
    device_ids = []
    for fields in answer.devices:
        device = fields["device"]
        if not _PART.fullmatch(device):
            raise BackendError(f"{path} has a device with {device!r} for its id; {_RULE}")
        number = numbers.setdefault(device, 0)
        numbers[device] += 1
        device_ids.append(f"native:{answer.name}.{device}:{number}")
    try:
        return check_devices("native", list(map(_info, device_ids, answer.devices)))
    except BackendError as error:
        raise BackendError(f"{path}: {error}") from error


_RULE = "a name has small letters, digits, - and _"


def _info(device_id: str, fields: Mapping[str, Any]) -> DeviceInfo:
    from .library import constant

    def dtypes(bits: int) -> tuple[str, ...]:
        known = {name: 1 << constant(name.upper()) for name in DTYPE_NBYTES}
        unknown = bits & ~sum(known.values())
        if unknown:
            raise BackendError(f"device {device_id!r} has unknown bits {unknown:#x} for dtypes")
        return tuple(name for name, bit in known.items() if bits & bit)

    return DeviceInfo(
        id=device_id,
        backend="native",
        kind=fields["kind"],
        name=fields["name"],
        vendor=fields["vendor"],
        driver=fields["driver"],
        memory_nbytes=fields["memory_nbytes"],
        memory_domain=fields["memory_domain"] or device_id,
        dtypes=dtypes(fields["dtypes"]),
        cast_dtypes=dtypes(fields["cast_dtypes"]),
        capabilities=Capabilities(
            queues=max(fields["queues"], 1),
            emulated=bool(fields["flags"] & constant("EMULATED")),
            reference=bool(fields["flags"] & constant("REFERENCE")),
            flushes_denormals=bool(fields["flags"] & constant("FLUSHES_DENORMALS")),
        ),
    )
