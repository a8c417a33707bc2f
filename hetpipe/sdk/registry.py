"""Where backends are found: entry points of the group `hetpipe.backends`, and the user's own.

A backend is imported on first use. It is other people's code: any exception, and any result other
than a list of devices, disables that backend alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any, get_origin, get_type_hints

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Device, Finding
from hetpipe.sdk.info import API_VERSION, DeviceInfo

GROUP = "hetpipe.backends"

_registered: dict[str, type[Backend]] = {}
_instances: dict[str, Backend] = {}


def register_backend(backend: type[Backend]) -> type[Backend]:
    """Make a backend class known under its `name`; usable as a decorator.

    Raises `BackendError` if another class already has the name.
    """
    first = _registered.get(backend.name)
    if first is not None and first is not backend:
        raise BackendError(
            f"backend {backend.name!r} is already {first.__module__}.{first.__qualname__}; "
            f"give {backend.__module__}.{backend.__qualname__} another name"
        )
    _registered[backend.name] = backend
    return backend


def backend_names() -> list[str]:
    """Names of all known backends, loaded or not, in order."""
    return sorted(_registered.keys() | {point.name for point in entry_points(group=GROUP)})


def get_backend(name: str) -> Backend:
    """The backend of that name, loaded and made on first use.

    Raises `BackendError` with the reason if it is unknown or cannot be loaded.
    """
    if name not in _instances:
        loaded = _load(name)
        with blamed(name, "fails when it is made"):
            _instances[name] = loaded()
    return _instances[name]


def decompositions_of(name: str) -> Mapping[Any, Callable[..., Any]]:
    """The decompositions of a backend, the same object every time. Raises `BackendError`."""
    return _decompositions(get_backend(name))


@cache
def _decompositions(backend: Backend) -> Mapping[Any, Callable[..., Any]]:
    with blamed(backend.name, "fails to give its decompositions"):
        return backend.decompositions()


def backend_reference(name: str) -> str | None:
    """`module:class` by which another process can load the backend; None if it cannot."""
    cls = type(get_backend(name))
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return None
    return f"{cls.__module__}:{cls.__qualname__}"


@contextmanager
def blamed(name: str, problem: str) -> Iterator[None]:
    """Turn exceptions of backend `name` inside into a `BackendError` that names it.

    Its own `BackendError` passes unchanged, and so does Ctrl-C.
    """
    try:
        yield
    except BackendError:
        raise
    except (Exception, SystemExit) as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise BackendError(f"backend {name!r} {problem}: {reason}") from error


def _load(name: str) -> type[Backend]:
    if name in _registered:
        return _registered[name]
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        raise BackendError(f"no backend {name!r}; known: {', '.join(backend_names()) or 'none'}")
    with blamed(name, f"cannot be loaded from {points[0].value}"):
        loaded = points[0].load()
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendError(f"backend {name!r}: {points[0].value} is not a Backend class")
    return loaded


def devices_of(name: str) -> list[DeviceInfo]:
    """The devices that a backend finds.

    Raises `BackendError` with the reason if the backend cannot be loaded, fails, or returns
    anything but a list of devices.
    """
    backend = get_backend(name)
    with blamed(name, "fails to find its devices"):
        infos = backend.discover()
    if not isinstance(infos, (list, tuple)):
        raise BackendError(
            f"backend {name!r}: discover returns {type(infos).__name__}, not a list of DeviceInfo"
        )
    for info in infos:
        _check_info(name, info)
    return list(infos)


def _check_info(name: str, info: Any) -> None:
    """Raises `BackendError` if a backend's description of a device has wrong types or names."""
    if not isinstance(info, DeviceInfo):
        raise BackendError(
            f"backend {name!r}: discover returns a list with {type(info).__name__} {info!r} in it, "
            "where a DeviceInfo belongs"
        )
    for field, hint in get_type_hints(DeviceInfo).items():
        value, expected = getattr(info, field), get_origin(hint) or hint
        if not isinstance(value, expected):
            raise BackendError(
                f"backend {name!r}: {field} of device {info.id!r} is {type(value).__name__} "
                f"{value!r}, not {expected.__name__}"
            )
    if info.id.partition(":")[0] != name or info.backend != name:
        raise BackendError(
            f"backend {name!r}: device {info.id!r} says that its backend is {info.backend!r}; ids "
            f"are {name}:name:index"
        )


def findings_of(name: str) -> list[Finding]:
    """The findings of `Backend.describe`, and the reason for its lack of devices if it fails.

    Raises `BackendError` if `describe` itself fails.
    """
    backend, findings, failure = get_backend(name), [], ""
    try:
        devices_of(name)
    except BackendError as error:
        failure = str(error)
    try:
        with blamed(name, "fails to describe itself"):
            findings = [(level, text, cure) for level, text, cure in backend.describe()]
    except BackendError:
        if not failure:
            raise
    if failure and all(text != failure for _, text, _ in findings):
        findings.append(("broken", failure, ""))
    return findings


def discover_devices(
    names: list[str] | None = None,
) -> tuple[list[DeviceInfo], dict[str, str]]:
    """All devices of the named backends (default all), and per failed backend the reason."""
    devices: list[DeviceInfo] = []
    failures: dict[str, str] = {}
    for name in backend_names() if names is None else names:
        try:
            devices += devices_of(name)
        except BackendError as error:
            failures[name] = str(error)
    return devices, failures


def open_device(device_id: str) -> Device:
    """Open the device of that id.

    Raises `BackendError`, with the list of devices, if there is none of that id.
    """
    name = device_id.partition(":")[0]
    infos = {info.id: info for info in devices_of(name)}
    if device_id not in infos:
        raise BackendError(f"no device {device_id!r}; found: {', '.join(infos) or 'none'}")
    info = infos[device_id]
    if info.api_version != API_VERSION:
        raise BackendError(
            f"{device_id} was written for version {info.api_version} of the backend contract, "
            f"this hetpipe has version {API_VERSION}"
        )
    with blamed(name, f"fails to open {device_id}"):
        return get_backend(name).open(info)
