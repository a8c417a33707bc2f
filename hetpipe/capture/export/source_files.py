"""Finds the source files on which a capture depends.

They are the files of the model and the loss, and all files that these reach through their globals.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import hetpipe

_VERSIONED = ("torch", "numpy", "hetpipe", "sympy")
"""Packages that are known by their version, or by `library_digest`."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class UnknownCodeError(Exception):
    """Nobody can tell whether the code is the same as at another time."""


def digest_of(model: nn.Module, loss_fn: Callable[..., Any]) -> str | None:
    """Return a hash of these files' contents; None if code has no file, as at a prompt."""
    modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
    names = {type(module).__module__ for module in modules}
    names.add(getattr(loss_fn, "__module__", None) or type(loss_fn).__module__)
    digest = hashlib.sha256()
    for name in sorted(_reachable_modules(names)):
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not file.endswith(".py"):
            return None
        try:
            content = Path(file).read_bytes()
        except OSError:
            return None
        digest.update(repr((name, len(content))).encode() + content)
    return digest.hexdigest()


@cache
def library_digest() -> str:
    """Return a hash of hetpipe's sources, and of the versions of Python and torch."""
    digest = hashlib.sha256(f"{sys.version}{torch.__version__}{torch.version.git_version}".encode())
    backends = importlib.import_module("hetpipe.backends")
    for root in map(Path, (*hetpipe.__path__, *backends.__path__)):
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def identity(function: Any) -> object:
    """Return a value that is equal for two functions only if both do the same.

    Raises `UnknownCodeError` unless the function belongs to hetpipe or torch.
    """
    if isinstance(function, partial):
        settings = [*function.args, *function.keywords.values()]
        return identity(function.func), list(function.keywords), list(map(_identity_of, settings))
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _VERSIONED or name is None:
        raise UnknownCodeError(repr(function))
    cells = () if module.startswith("torch") else getattr(function, "__closure__", None) or ()
    return module, name, tuple(_identity_of(cell.cell_contents) for cell in cells)


def _identity_of(value: Any) -> object:
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, tuple):
        return tuple(map(_identity_of, value))
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    return identity(value)


def _reachable_modules(names: Iterable[str]) -> set[str]:
    """Return the modules that these modules reach through their globals.

    Versioned packages do not count.
    """
    stack, reached = list(names), set[str]()
    while stack:
        name = stack.pop()
        module = sys.modules.get(name)
        if name in reached or module is None or _is_versioned(name, module):
            continue
        reached.add(name)
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                stack.append(value.__name__)
            elif isinstance(origin := getattr(value, "__module__", None), str):
                stack.append(origin)
    return reached


def _is_versioned(name: str, module: ModuleType) -> bool:
    top = name.partition(".")[0]
    if top in _VERSIONED or top in sys.builtin_module_names:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names and top != "__main__"
    if any(part in ("site-packages", "dist-packages") for part in Path(file).parts):
        return False
    return Path(file).is_relative_to(_STANDARD_LIBRARY)
