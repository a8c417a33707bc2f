"""Keeps the attributes of modules as they were while their code runs."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
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
            if table.keys() != before.keys() or any(table[n] is not before[n] for n in before):
                table.clear()
                table.update(before)
        for container, before in items:
            _restore(container, before)


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
