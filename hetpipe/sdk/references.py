"""Backends by reference: the text by which a worker process loads a class of the controller's."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from hetpipe.errors import BackendError
from hetpipe.sdk.backend import Backend
from hetpipe.sdk.registry import get_backend, register_backend

_executing: list[Path] = []  # the script that this process loads at the moment


def backend_reference(name: str) -> str | None:
    """`module:class`, or `FILE.py:class` for a class of the script that is run; None for a class
    inside a function, or typed at a prompt."""
    cls = type(get_backend(name))
    module = cls.__module__
    if "<locals>" in cls.__qualname__:
        return None
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m MODULE
            module = spec.name
        elif file is not None and Path(file).is_file():
            module = str(Path(file).resolve())
        else:
            return None
    return f"{module}:{cls.__qualname__}"


def load_reference(reference: str) -> type[Backend]:
    """Load and register the backend of a reference. Raises `BackendError` if that fails.

    A script is executed as a module, so what stands under `if __name__ == "__main__"` is not.
    """
    place, _, name = reference.rpartition(":")
    path = Path(place)
    module = _script(path) if path.suffix == ".py" else importlib.import_module(place)
    try:
        loaded: Any = attrgetter(name)(module)
    except AttributeError as error:
        raise BackendError(f"{place} has no class {name}") from error
    return register_backend(loaded)


def check_not_loading() -> None:
    """Raise `BackendError` if this process only loads a script's backend: it must not train."""
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
