"""Keeps the attributes of modules as they were while their code runs."""

from __future__ import annotations

import copy
import functools
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn

MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes in which torch keeps layers, parameters, buffers and hooks."""
DEPTH = 3
"""The depth to which containers in an attribute are followed."""


@contextmanager
def kept_attributes(run: nn.Module) -> Iterator[None]:
    """Afterwards all modules have the attributes from before, and their containers the same items.

    Code that is exported runs on tensors without values. What it stores for inspection would stay
    in the user's modules, and no copy could be made of it.
    """
    tables = [vars(module) for module in run.modules()]
    present = [(table, dict(table)) for table in tables]
    items = [
        (container, copy.copy(container))
        for table in tables
        for name, value in table.items()
        if name not in MODULE_TABLES
        for container in _containers(value, DEPTH)
    ]
    try:
        yield
    finally:
        for table, before in present:
            restore_table(table, before)
        for container, before in items:
            _restore(container, before)


def restore_table(table: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Give a table of a module its former entries, in their order, if it has others."""
    if table.keys() != before.keys() or any(table[name] is not before[name] for name in before):
        table.clear()
        table.update(before)


@contextmanager
def kept_caches(run: nn.Module) -> Iterator[None]:
    """Afterwards no `functools.lru_cache` has tensors without values.

    Caches that the code inside has filled are cleared: those of the modules' classes and files.
    """
    caches = {cache: cache.cache_info().misses for cache in set(_caches(run))}
    try:
        yield
    finally:
        for cache, misses in caches.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _caches(run: nn.Module) -> Iterator[functools._lru_cache_wrapper[Any]]:
    classes = {cls for module in run.modules() for cls in type(module).__mro__}
    files = {cls.__module__ for cls in classes}
    files |= {getattr(value, "__module__", None) or "torch." for value in vars(run).values()}
    own = [cls for cls in classes if not cls.__module__.startswith("torch.")]
    for owner in (*own, *(sys.modules.get(name) for name in files)):
        if owner is not None and not owner.__name__.startswith(("torch.", "builtins")):
            for value in list(vars(owner).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    yield value


def names_module(function: Any, model: nn.Module) -> bool:
    """Whether a function has a module of the model in its closure or among its globals."""
    if not isinstance(function, FunctionType):
        return False
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # one is empty
        cells = []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    modules = set(model.modules())
    return any(isinstance(each, nn.Module) and each in modules for each in (*cells, *named))


def _containers(value: Any, depth: int) -> Iterator[Any]:
    """The container and the containers in it."""
    if depth == 0 or not isinstance(value, (list, deque, dict, set)):
        return
    yield value
    for item in value.values() if isinstance(value, dict) else value:
        yield from _containers(item, depth - 1)


def _restore(container: Any, before: Any) -> None:
    container.clear()
    if isinstance(container, (dict, set)):
        container.update(before)
    else:
        container.extend(before)
