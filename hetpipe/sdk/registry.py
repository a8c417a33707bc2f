"""Where backends are found: entry points of the group `hetpipe.backends`, and the user's own.

Nothing is imported until asked for, and a backend that fails to load disables itself alone.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Device
from hetpipe.sdk.info import API_VERSION, DeviceInfo

GROUP = "hetpipe.backends"

_registered: dict[str, type[Backend]] = {}
_instances: dict[str, Backend] = {}


def register_backend(backend: type[Backend]) -> type[Backend]:
    """Make a backend class known under its `name`; usable as a decorator.

    Raises `BackendError` if another class already has the name.
    """
    known = _registered.get(backend.name)
    if known is not None and known is not backend:
        raise BackendError(
            f"backend {backend.name!r} is already {known.__module__}.{known.__qualname__}; "
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
        _instances[name] = _load(name)()
    return _instances[name]


def backend_reference(name: str) -> str | None:
    """`module:class` by which another process can load the backend; None if it cannot."""
    cls = type(get_backend(name))
    if cls.__module__ == "__main__" or "<locals>" in cls.__qualname__:
        return None
    return f"{cls.__module__}:{cls.__qualname__}"


def _load(name: str) -> type[Backend]:
    if name in _registered:
        return _registered[name]
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        raise BackendError(f"no backend {name!r}; known: {', '.join(backend_names()) or 'none'}")
    try:
        loaded = points[0].load()
    except Exception as error:
        raise BackendError(f"backend {name!r} cannot be loaded: {error}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Backend)):
        raise BackendError(f"backend {name!r}: {points[0].value} is not a Backend class")
    return loaded


def discover_devices(
    names: list[str] | None = None,
) -> tuple[list[DeviceInfo], dict[str, str]]:
    """All devices of the named backends (default all), and per failed backend the reason."""
    devices: list[DeviceInfo] = []
    failures: dict[str, str] = {}
    for name in backend_names() if names is None else names:
        try:
            devices += get_backend(name).discover()
        except BackendError as error:
            failures[name] = str(error)
    return devices, failures


def open_device(device_id: str) -> Device:
    """Open the device of that id.

    Raises `BackendError` if there is none, listing those that there are.
    """
    backend = get_backend(device_id.partition(":")[0])
    infos = {info.id: info for info in backend.discover()}
    if device_id not in infos:
        raise BackendError(f"no device {device_id!r}; found: {', '.join(infos) or 'none'}")
    info = infos[device_id]
    if info.api_version != API_VERSION:
        raise BackendError(
            f"{device_id} was written for version {info.api_version} of the backend contract, "
            f"this hetpipe has version {API_VERSION}"
        )
    return backend.open(info)
