"""References to backends: texts by which a worker process loads the controller's backend class."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch._library.simple_registry
from torch._library.custom_ops import OPDEFS

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend
from hetpipe.sdk.graph import resolve_operator
from hetpipe.sdk.host.registry import get_backend, register_backend

_executing: list[Path] = []  # the script that this process loads at the moment


def backend_reference(name: str) -> str | None:
    """Return `module:class`, or `FILE.py:class` for a class of the script that runs.

    Returns None for a class that is defined in a function or at a prompt.
    """
    cls = type(get_backend(name))
    if "<locals>" in cls.__qualname__:
        return None
    place = _place(cls.__module__)
    return None if place is None else f"{place}:{cls.__qualname__}"


def _place(module: str) -> str | None:
    """Return the name by which another process imports a module; a file for the running script."""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m MODULE
            module = spec.name
        elif file is not None and Path(file).is_file():
            module = str(Path(file).resolve())
        else:
            return None
    return module


def load_reference(reference: str) -> type[Backend]:
    """Load and register the backend of a reference. Raises `BackendError`, or the import's error.

    A script runs as a module, without the code under `if __name__ == "__main__"`.
    """
    place, _, name = reference.rpartition(":")
    path = Path(place)
    module = _script(path) if path.suffix == ".py" else importlib.import_module(place)
    try:
        loaded: Any = attrgetter(name)(module)
    except AttributeError as error:
        raise BackendError(f"{place} has no class {name}; define it at the top level") from error
    return register_backend(loaded)


def operator_origins(operators: Iterable[str]) -> list[str]:
    """Return the modules, scripts and libraries that define operators (`mine.square.default`).

    Operators of torch and hetpipe are skipped. Raises `BackendError` for an unknown origin.
    """
    origins: dict[str, None] = {}
    for operator in operators:
        space, _, rest = operator.partition(".")
        if not rest or space in _KNOWN_SPACES:
            continue
        name = f"{space}::{rest.partition('.')[0]}"
        place = _origin(name)
        if place is not None:
            origins[place] = None
        elif torch.ops.loaded_libraries:
            origins |= dict.fromkeys(sorted(torch.ops.loaded_libraries))
        else:
            raise BackendError(
                f"the operator {name} is not known to worker processes, and the file that defines "
                "it was not found: define it with torch.library.custom_op at the top level of a "
                "module or of the script"
            )
    return list(origins)


_KNOWN_SPACES = ("aten", "prims", "hetpipe", "getitem")


def _origin(name: str) -> str | None:
    """Return the module or script that defines an operator in Python."""
    definition = OPDEFS.get(name)
    if definition is not None:
        return _place(definition._init_fn.__module__)
    entry = torch._library.simple_registry.singleton.find(name)
    kernel = entry.fake_impl.kernel
    file = "" if kernel is None else kernel.source.rpartition(":")[0]
    modules = [key for key, m in list(sys.modules.items()) if getattr(m, "__file__", None) == file]
    return _place(modules[0]) if file and modules else None


def import_operators(_device: object, operators: Sequence[str], origins: Sequence[str]) -> None:
    """Import the origins of operators, in a worker that lacks one of the operators."""
    if all(_is_there(operator) for operator in operators):
        return
    for origin in origins:
        path = Path(origin)
        if path.suffix == ".py":
            _script(path)
        elif path.is_absolute():
            load_library: Any = torch.ops.load_library
            load_library(origin)
        else:
            importlib.import_module(origin)


def _is_there(operator: str) -> bool:
    try:
        resolve_operator(operator)
    except BackendError:
        return False
    return True


def check_not_loading() -> None:
    """Raise `BackendError` while this process loads a backend's script, which must not train."""
    if _executing:
        raise BackendError(
            f"{_executing[-1]} trains while a worker loads the backend that it defines: put the "
            'training under `if __name__ == "__main__":`, or the backend into a module'
        )


def _script(path: Path) -> ModuleType:
    name = f"hetpipe_script_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BackendError(f"{path} cannot be loaded as a module")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _executing.append(path)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _executing.pop()
    return module
