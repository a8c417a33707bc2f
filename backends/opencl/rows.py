"""Kernels over rows: how many a work-item takes in turn, and where it writes long results."""

from __future__ import annotations

import math

from .expr import Value
from .target import Target

MOST_EACH = 16
"""Rows of a work-item at most: all but the first are on their way while others are computed."""
BALANCE = 4
"""Work-items for each compute unit, at least, before any takes several rows."""
LINE = 16
"""Floats of a cache line."""
PAST_CACHES = "-DPAST_CACHES"


def rows_each(device: Target, rows: int) -> int:
    """Rows that a work-item takes in turn. On a GPU work-items hide the time that memory takes."""
    if device.kind == "gpu":
        return 1
    return max(1, min(MOST_EACH, rows // (BALANCE * device.compute_units)))


def past_caches(device: Target, result: Value, length: int) -> tuple[str, ...]:
    """The option for rows of `length` that are written past the caches, or none.

    That suits a result which, with as large an operand, fills the last cache: lines that are only
    written are not read before, and the rows that come next stay.
    """
    large = 4 * math.prod(result.shape) >= device.last_cache_nbytes // 2
    processor = device.kind == device.family == "cpu" and not device.checks_memory
    return (PAST_CACHES,) if processor and large and length % LINE == 0 else ()
