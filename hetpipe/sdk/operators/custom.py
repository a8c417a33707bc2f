"""hetpipe's own operators: torch knows them, and backends may call their Python functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload

_functions: dict[str, Callable[..., Any]] = {}


def define(name: str, function: Callable[..., Any], schema: str | None = None) -> CustomOpDef:
    """Define an operator `hetpipe::name` that calls `function`, which changes no argument."""
    _functions[f"hetpipe.{name}"] = function
    return torch.library.custom_op(f"hetpipe::{name}", function, mutates_args=(), schema=schema)


def operator(name: str) -> Callable[[Callable[..., Any]], CustomOpDef]:
    """Return a decorator that makes a function an operator; see `define`."""
    return lambda function: define(name, function)


def function_of(target: OpOverload) -> Callable[..., Any] | None:
    """Return the Python function of an operator of hetpipe; None for any other operator.

    The function takes the operator's arguments. Calling the function saves a second: a call of the
    operator would first import torch's compiler.
    """
    return _functions.get(str(target).rpartition(".")[0])
