"""Indices out of range: a pass computes the least such index, and its end event reports it.

Kernels read and write nothing outside a tensor: a read at an index out of range gives NaN (0 for
integers), and a write is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import fx

from hetpipe.sdk.indices import Bound, index_bounds

from .builder import Builder
from .expr import Const, Expr, Value, loads
from .memory import Bytes, Memory
from .reduce import MINIMUM, reduce

NONE = int(np.iinfo(np.int64).max)
"""The value that says that no index is outside."""


@dataclass(frozen=True)
class Check:
    """`value`, int64 of one element, is the least index outside `bound`, or NONE."""

    bound: Bound
    value: Value


@dataclass(frozen=True)
class Outcome:
    """The result of a check in one run; the host has its 8 bytes when the run has ended."""

    bound: Bound
    memory: Memory
    host: Bytes

    def check(self, device_id: str) -> None:
        """Raise `BackendError` if an index was outside."""
        least = int(self.host[:8].view(np.int64)[0])
        if least != NONE:
            raise self.bound.error(device_id, least)


def checks(builder: Builder, calls: Iterable[fx.Node]) -> tuple[Check, ...]:
    """Lower the checks of all calls that take indices; calls with the same bound share one."""
    distinct: dict[tuple[Any, ...], Check] = {}
    for bound in (bound for node in calls for bound in index_bounds(node)):
        index = builder.expr(bound.index)
        key = (index, bound.low, bound.size, bound.ignored)
        # Indices that read no tensor are constants of the graph: torch has checked them already.
        if key not in distinct and index.numel and loads(index):
            distinct[key] = Check(bound, _least_outside(builder, index, bound))
    # An index tensor of one element and a view of it have one result: it is looked at once.
    return tuple({check.value.id: check for check in reversed(distinct.values())}.values())[::-1]


def _least_outside(builder: Builder, index: Expr, bound: Bound) -> Value:
    if index.dtype != "int64":
        index = builder.apply("convert_{T}({0})", "int64", index, weight=0)
    ignored = bound.low if bound.ignored is None else bound.ignored
    numbers = (
        builder.pool.make(Const, index.shape, "int64", number)
        for number in (NONE, bound.low, bound.size, ignored)
    )
    inside = "(({0} >= {2}) & ({0} < {3})) | ({0} == {4})"
    code = f"select({{0}}, {{1}}, convert_{{M}}({inside}))"
    outside = builder.apply(code, "int64", index, *numbers, weight=4)
    return reduce(builder, outside, range(len(index.shape)), MINIMUM)
