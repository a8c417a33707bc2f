"""Checks of indices: a pass computes the least one out of range, and its end event reports it.

Kernels never access memory outside a tensor: a read at an index out of range gives NaN (0 for
integers), and a write there does nothing.
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
from .reduce import MINIMUM, reduce

NONE = int(np.iinfo(np.int64).max)
"""Result of a check that finds no index out of range."""


@dataclass(frozen=True)
class Check:
    """A check: `value` (int64, one element) is the least index outside `bound`, or NONE."""

    bound: Bound
    value: Value


def checks(builder: Builder, calls: Iterable[fx.Node]) -> tuple[Check, ...]:
    """Lower the checks of all calls with indices; calls with equal index and bound share one."""
    distinct: dict[tuple[Any, ...], Check] = {}
    for bound in (bound for node in calls for bound in index_bounds(node)):
        index = builder.expr(bound.index)
        key = (index, bound.low, bound.size, bound.ignored)
        # Indices that read no tensor are constants of the graph: torch has already checked them.
        if key not in distinct and index.numel and loads(index):
            distinct[key] = Check(bound, _least_outside(builder, index, bound))
    # An index tensor of one element and a view of it share one result: check it once.
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
