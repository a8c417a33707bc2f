"""Lazy module attributes (PEP 562): `import hetpipe` costs nothing until a name is used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: str, index: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of `package` for an index of name -> submodule.

    An entry whose name equals its submodule's last part and starts in lower case is the module.
    """

    def getattr_(name: str) -> Any:
        if name not in index:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{index[name]}")
        value = module if name == index[name] else getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return getattr_, lambda: sorted(index), sorted(index)
