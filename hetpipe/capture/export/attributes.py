"""Restores the attributes of modules, and the globals of their files, after code has run."""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

MODULE_TABLES = frozenset(vars(nn.Module())) - {"training"}
"""The attributes in which torch keeps layers, parameters, buffers and hooks."""
DEPTH = 3
"""Levels of nested containers in an attribute that are searched."""
MOST_ITEMS = 10_000
"""Containers with more items count as data and are not searched."""


@contextmanager
def keep_attributes(run: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules, and the items of their containers, on exit.

    Export runs the user's code on tensors without values. If the code stores such a tensor in a
    module, the module cannot be copied afterwards.
    """
    tables = [vars(module) for module in run.modules()]
    originals = [(table, dict(table)) for table in tables]
    values = (
        value for table in tables for name, value in table.items() if name not in MODULE_TABLES
    )
    copies = _copies(values, DEPTH)
    try:
        yield
    finally:
        for table, before in originals:
            restore_table(table, before)
        for container, before in copies:
            _restore(container, before)


@contextmanager
def keep_globals(*runs: object) -> Iterator[None]:
    """On exit, remove tensors without values from the classes and files of `runs`.

    Exported code may compute a table once and store it in a global dictionary. All other new values
    stay in the globals, for instance an import.
    """
    owners = {owner for run in runs for owner in _owners(run)}
    present = [(owner, dict(vars(owner))) for owner in owners]
    copies = _copies((value for _, names in present for value in names.values()), 2)
    try:
        yield
    finally:
        for container, before in copies:
            values = container.values() if isinstance(container, dict) else container
            if any(map(_has_no_values, values)):
                _restore(container, before)
        for owner, names in present:
            for name, value in list(vars(owner).items()):
                if _has_no_values(value) and value is not names.get(name):
                    setattr(owner, name, names[name]) if name in names else delattr(owner, name)


def restore_table(table: dict[str, Any], before: Mapping[str, Any]) -> None:
    """If a module's table has changed, restore its entries and their order."""
    if table.keys() != before.keys() or any(table[name] is not before[name] for name in before):
        table.clear()
        table.update(before)


@contextmanager
def clear_caches(run: nn.Module) -> Iterator[None]:
    """On exit, clear each `functools.lru_cache` that the code inside the block has filled.

    Such a cache would keep tensors without values. Only caches in the modules' classes and files
    are found.
    """
    caches = {
        value: value.cache_info().misses
        for owner in _owners(run)
        for value in list(vars(owner).values())
        if isinstance(value, functools._lru_cache_wrapper)
    }
    try:
        yield
    finally:
        for cache, misses in caches.items():
            if cache.cache_info().misses != misses:
                cache.cache_clear()


def _owners(run: object) -> Iterator[type | ModuleType]:
    """Yield the files of a function, or of a module and its submodules, and the files' classes."""
    modules = list(run.modules()) if isinstance(run, nn.Module) else []
    classes = {cls for module in modules for cls in type(module).__mro__}
    classes -= set(nn.Module.__mro__)
    files = {cls.__module__ for cls in classes}
    sources = [run, *vars(run).values()] if modules else [run]
    files |= {getattr(value, "__module__", None) or "torch" for value in sources}
    files = {name for name in files if name.partition(".")[0] not in ("torch", "builtins")}
    for name in files & sys.modules.keys():
        yield (file := sys.modules[name])
        values = list(vars(file).values())
        classes |= {each for each in values if isinstance(each, type) and each.__module__ == name}
    yield from (cls for cls in classes if not cls.__module__.startswith(("torch.", "builtins")))


def names_module(function: Any, model: nn.Module) -> bool:
    """Return whether a function refers to a module of the model, by its closure or its globals."""
    if not isinstance(function, FunctionType):
        return False
    try:
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell is empty
        cells = []
    named = [function.__globals__.get(name) for name in function.__code__.co_names]
    modules = set(model.modules())
    return any(isinstance(value, nn.Module) and value in modules for value in (*cells, *named))


def _copies(values: Iterable[Any], depth: int) -> list[tuple[Any, Any]]:
    """Return the containers in the values, nested up to `depth` levels, each with a copy."""
    containers = {
        id(container): container for value in values for container in _containers(value, depth)
    }
    return [(container, copy.copy(container)) for container in containers.values()]


def _containers(value: Any, depth: int) -> Iterator[Any]:
    """Yield a container and the containers inside it; an object counts as its `__dict__`."""
    if depth == 0:
        return
    if _is_plain_object(value):
        value = vars(value)
    if not isinstance(value, (list, deque, dict, set)) or len(value) > MOST_ITEMS:
        return
    if isinstance(value, dict) and type(value).items not in (dict.items, OrderedDict.items):
        return  # its items are computed on request
    yield value
    for item in list(value.values()) if isinstance(value, dict) else list(value):
        yield from _containers(item, depth - 1)


def _is_plain_object(value: Any) -> bool:
    """Return whether the value is an object with attributes, of a class outside torch."""
    kinds = (type, ModuleType, FunctionType, nn.Module, torch.Tensor)
    if isinstance(value, kinds) or not hasattr(value, "__dict__"):
        return False
    return type(value).__module__.partition(".")[0] not in ("torch", "builtins", "functools")


def _has_no_values(value: Any) -> bool:
    """Return whether the value is a tensor of an export, or on the meta device."""
    if not isinstance(value, torch.Tensor):
        return False
    return isinstance(value, (FakeTensor, FunctionalTensor)) or value.device.type == "meta"


def _restore(container: Any, before: Any) -> None:
    """If a container has changed, restore its items and their order."""
    if isinstance(container, dict):
        restore_table(container, before)
    elif len(container) != len(before) or any(map(operator.is_not, container, before)):
        container.clear()
        getattr(container, "update" if isinstance(container, set) else "extend")(before)
