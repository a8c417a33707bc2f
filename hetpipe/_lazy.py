"""Lazy attributes of packages (PEP 562): the first use of a public name imports its module.

A package lists its public names once, as imports that type checkers read:

    if TYPE_CHECKING:
        from hetpipe.cluster.cluster import Cluster as Cluster
    else:
        __getattr__, __dir__ = lazy(__name__)
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions `__getattr__` and `__dir__` of a package.

    `__getattr__` imports a public name on first use; `__all__` is the list of these names. A
    submodule wins over a function of the same name, because Python binds a submodule to its package
    whenever the submodule is imported.
    """

    @cache
    def index() -> dict[str, str]:
        path = sys.modules[package].__file__
        assert path is not None
        return index_of(ast.parse(Path(path).read_text("utf-8")), package)

    def getattr_(name: str) -> Any:
        if name == "__all__":
            return sorted(index())
        if name.startswith("__") or name not in index():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = index()[name]
        module = import_module(f"{package}.{name}" if source == package else source)
        bound = vars(sys.modules[package])
        if name not in bound:
            bound[name] = getattr(module, name)
        return bound[name]

    return getattr_, lambda: sorted(index())


def index_of(tree: ast.Module, package: str) -> dict[str, str]:
    """Return the module of each name that `tree`, an `__init__.py`, imports as `name as name`."""
    return {
        alias.name: resolve_name("." * node.level + (node.module or ""), package)
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
