"""The registry of backends: entry points of the group `hetpipe.backends`, and users' classes.

A backend is imported on first use. It may be other people's code, so an exception, a wrong result
or no answer within a time limit disables only this backend.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend, Device, Finding
from hetpipe.sdk.host.isolation import NoAnswerError, ask, blamed
from hetpipe.sdk.host.validation import check_class, check_devices
from hetpipe.sdk.info import DeviceInfo
from hetpipe.words import choices

GROUP = "hetpipe.backends"
LOAD_LIMIT_S = 120.0
"""Most seconds for the import of a backend; a first import of torch takes 20 seconds."""

_registered: dict[str, type[Backend]] = {}
_instances: dict[str, Backend] = {}
_options: dict[str, tuple[Mapping[str, Any], Path]] = {}  # by backend: its options, their folder
_known: dict[str, list[DeviceInfo]] = {}  # by backend: the devices that it found last
_silent: dict[str, NoAnswerError] = {}  # by backend: the error for its missing answer


@dataclass(frozen=True)
class Provider:
    """The origin of a backend: an installed package, or a file of the user."""

    source: str
    """`module:class` of an entry point, or the file that registers the class."""
    package: str = ""
    """The distribution with the entry point; empty for a class that was registered here."""
    version: str = ""

    def __str__(self) -> str:
        return f"{self.package} {self.version}" if self.package else self.source

    @property
    def ours(self) -> bool:
        """Whether the backend is a part of hetpipe."""
        return self.package == __name__.partition(".")[0]


def register_backend(backend: type[Backend]) -> type[Backend]:
    """Make a backend class known under its `name`; usable as a decorator.

    Raises `BackendError` if the class is no backend, or if another class has the name.
    """
    qualified = f"{getattr(backend, '__module__', '?')}.{getattr(backend, '__qualname__', backend)}"
    check_class(backend, qualified)
    first = _registered.get(backend.name)
    if first is not None and first is not backend:
        raise BackendError(
            f"backend {backend.name!r} is already {first.__module__}.{first.__qualname__}; "
            f"give {qualified} another name"
        )
    _registered[backend.name] = backend
    return backend


def backend_names() -> list[str]:
    """Return the names of all known backends, loaded or not, sorted."""
    return sorted(_registered.keys() | {point.name for point in entry_points(group=GROUP)})


def provider_of(name: str) -> Provider:
    """Return the origin of a backend without loading it. Raises `BackendError` if unknown."""
    if point := _entry_point(name):
        distribution = point.dist
        package = "" if distribution is None else distribution.metadata["Name"]
        return Provider(point.value, package, "" if distribution is None else distribution.version)
    if name in _registered:
        module = sys.modules.get(_registered[name].__module__)
        return Provider(getattr(module, "__file__", None) or _registered[name].__module__)
    raise _unknown(name)


def get_backend(name: str) -> Backend:
    """Return the backend of that name; the first call loads and creates it.

    Raises `BackendError` with the reason if the backend is unknown or cannot be loaded.
    """
    if name not in _instances:
        loaded = _load(name)
        with blamed(name, "fails when it is made"):
            _instances[name] = loaded()
    return _instances[name]


def configure_backend(name: str, options: Mapping[str, Any], folder: Path) -> None:
    """Give a backend the options of a cluster file in `folder`, unless it has them already.

    Raises `BackendError` if there is no such backend, or if it refuses the options.
    """
    if _options.get(name) == (options, folder):
        return
    backend = get_backend(name)
    with blamed(name, "fails to take its options"):
        backend.configure(options, folder)
    _decompositions.cache_clear()  # the options may change the decompositions
    _known.pop(name, None)
    _options[name] = (options, folder)


def forget_options(name: str) -> None:
    """Remove the options that an earlier cluster file gave to a backend, if any."""
    if name in _options:
        configure_backend(name, {}, _options[name][1])
        del _options[name]


def decompositions_of(name: str) -> Mapping[Any, Callable[..., Any]]:
    """Return a backend's decompositions, kept until its options change. Raises `BackendError`."""
    return _decompositions(get_backend(name))


@cache
def _decompositions(backend: Backend) -> Mapping[Any, Callable[..., Any]]:
    with blamed(backend.name, "fails to give its decompositions"):
        return backend.decompositions()


def _load(name: str) -> type[Backend]:
    if name in _silent:
        raise _silent[name]
    registered, point = _registered.get(name), _entry_point(name)
    if point is None:
        if registered is None:
            raise _unknown(name)
        return registered
    loaded = check_class(
        _asked(name, f"cannot be loaded from {point.value}", LOAD_LIMIT_S, point.load),
        f"backend {name!r}: {point.value}",
    )
    if loaded.name != name:
        raise BackendError(
            f"backend {name!r}: {point.value} has the name {loaded.name!r}; the entry point and "
            "the class need the same name"
        )
    if registered is not None and registered is not loaded:
        raise BackendError(
            f"backend {name!r} is {registered.__module__}.{registered.__qualname__} here and "
            f"{point.value} in an installed package: give one of them another name"
        )
    return loaded


def _entry_point(name: str) -> EntryPoint | None:
    """Return the entry point of that name. Raises `BackendError` if packages disagree about it."""
    points = {point.value: point for point in entry_points(group=GROUP) if point.name == name}
    if len(points) > 1:
        raise BackendError(
            f"backend {name!r} is in several installed packages: {', '.join(sorted(points))}; "
            "uninstall all but one"
        )
    return next(iter(points.values()), None)


def _unknown(name: str) -> BackendError:
    return BackendError(f"no backend {name!r}; {choices(name, backend_names())}")


def _asked(name: str, problem: str, limit_s: float, question: Callable[[], Any]) -> Any:
    """Return a backend's answer. After one missing answer, the backend is not asked again."""
    if name in _silent:
        raise _silent[name]
    try:
        return ask(name, problem, limit_s, question)
    except NoAnswerError as error:
        _silent[name] = error
        raise


def devices_of(name: str) -> list[DeviceInfo]:
    """Return the devices that a backend finds.

    Raises `BackendError` with the reason if the backend cannot be loaded, raises an error, is too
    slow, or returns anything but a list of valid descriptions.
    """
    backend = get_backend(name)
    infos = _asked(name, "fails to find its devices", backend.discover_limit_s, backend.discover)
    _known[name] = check_devices(name, infos)
    return _known[name]


def known_devices(name: str) -> list[DeviceInfo]:
    """Return the devices that a backend finds, or that it found before if it gives no answer: one
    of them may hang, and the others can be opened. Raises `BackendError` as `devices_of` does."""
    try:
        return devices_of(name)
    except NoAnswerError:
        if name not in _known:
            raise
        return _known[name]


def findings_of(name: str) -> list[Finding]:
    """Return the findings of `Backend.describe`, and the error of `discover` if that fails.

    Raises `BackendError` if only `describe` fails.
    """
    backend, findings, failure = get_backend(name), [], ""
    try:
        devices_of(name)
    except BackendError as error:
        failure = str(error)
    try:
        problem = "fails to describe itself"
        described = _asked(name, problem, backend.discover_limit_s, backend.describe)
        with blamed(name, problem):
            findings = [(level, text, cure) for level, text, cure in described]
    except BackendError:
        if not failure:
            raise
    if failure and all(text != failure for _, text, _ in findings):
        findings.append(("broken", failure, ""))
    return findings


def discover_devices(
    names: list[str] | None = None,
) -> tuple[list[DeviceInfo], dict[str, str]]:
    """Return the devices of the named backends (default: all), and the error of each failed one."""
    devices: list[DeviceInfo] = []
    failures: dict[str, str] = {}
    for name in backend_names() if names is None else names:
        try:
            devices += devices_of(name)
        except BackendError as error:
            failures[name] = str(error)
    return devices, failures


def absent(device_id: str, found: Iterable[str]) -> BackendError:
    """Return the error for a device that its backend does not find, with the backend's faults."""
    there = choices(device_id, found)
    faults = faults_of(device_id.partition(":")[0])
    return BackendError("; ".join([f"no device {device_id!r}; {there}", *faults]))


def faults_of(name: str) -> list[str]:
    """Return the faults among a backend's findings."""
    return [text for level, text, _ in findings_of(name) if level == "broken"]


def open_device(device_id: str) -> Device:
    """Open the device of that id, with its companion if its backend asks for one.

    Raises `BackendError`, with the list of devices, if no device has that id.
    """
    device = open_bare(device_id)
    companion = companion_of(device.info.backend)
    if companion is None:
        return device
    from hetpipe.sdk.host.companion import CompanionDevice

    return CompanionDevice(device, open_bare(companion.id))


def companion_of(name: str) -> DeviceInfo | None:
    """Return the device that runs the operators that a backend's devices lack, or None.

    Raises `BackendError`, which names the backend and its `lends`, if there is no such device.
    """
    lends = get_backend(name).lends
    if not lends:
        return None
    problem = f"backend {name!r} has lends = {lends!r}, which"
    other = lends.partition(":")[0]
    if other == name:
        raise BackendError(f"{problem} is the same backend: name another backend in `lends`")
    try:
        infos = devices_of(other)
    except BackendError as error:
        raise BackendError(f"{problem} has no devices here: {error}") from error
    for info in infos:
        if lends in (other, info.id):
            return info
    found = ", ".join(info.id for info in infos) or "none"
    raise BackendError(f"{problem} is not on this machine; found: {found}")


def open_bare(device_id: str) -> Device:
    """Open the device of that id without a companion. Raises like `open_device`."""
    name = device_id.partition(":")[0]
    infos = {info.id: info for info in devices_of(name)}
    if device_id not in infos:
        raise absent(device_id, infos)
    backend, info = get_backend(name), infos[device_id]
    problem = f"fails to open {device_id}"
    device = _asked(name, problem, backend.open_limit_s, lambda: backend.open(info))
    if not isinstance(device, Device):
        raise BackendError(f"backend {name!r}: open returns {device!r}, not a Device")
    return device
