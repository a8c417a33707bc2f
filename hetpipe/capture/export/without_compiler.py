"""Keeps torch from importing its compiler, which takes a second."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import TypeGuard

import torch
import torch._compile
import torch._decomp.decompositions
import torch._refs.nn.functional

COMPILER_SKIPS = "__dynamo_disable"
"""Attribute of a function: its wrapped version, made by the compiler (`torch/_compile.py`)."""


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch's Python shape functions from importing its compiler.

    At the first call of such a function, torch imports the compiler only to let it skip the
    function.
    """
    marked = [] if "torch._dynamo" in sys.modules else list(_hidden_from_compiler())
    for function in marked:
        setattr(function, COMPILER_SKIPS, function)
    try:
        yield
    finally:
        for function in marked:
            delattr(function, COMPILER_SKIPS)


def _hidden_from_compiler() -> Iterator[FunctionType]:
    """Yield the shape functions inside `_disable_dynamo` that have no wrapped version yet."""
    modules = (torch._refs, torch._refs.nn.functional, torch._decomp.decompositions)
    stack = [value for module in modules for value in vars(module).values()]
    seen: set[int] = set()
    while stack:
        function = stack.pop()
        if not isinstance(function, FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        inside = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        stack += inside
        if function.__code__.co_filename == torch._compile.__file__:
            yield from (f for f in inside if _is_new(f))


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _is_new(function: object) -> TypeGuard[FunctionType]:
    return isinstance(function, FunctionType) and not hasattr(function, COMPILER_SKIPS)
