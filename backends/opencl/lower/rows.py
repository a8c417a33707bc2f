"""Kernels over rows: rows per work-item, and whether they write long results past the caches."""

from __future__ import annotations

import math

from .expr import Value
from .target import Target

MOST_EACH = 16
"""Most rows per work-item; the kernel reads the next row while it computes one."""
BALANCE = 4
"""Least number of work-items per compute unit before a work-item takes several rows."""
LINE = 16
"""Floats per cache line."""
PAST_CACHES = "-DPAST_CACHES"


def rows_each(device: Target, rows: int) -> int:
    """Return the rows per work-item: 1 on a GPU, where many work-items hide memory latency."""
    if device.kind == "gpu":
        return 1
    return max(1, min(MOST_EACH, rows // (BALANCE * device.compute_units)))


def past_caches(device: Target, result: Value, length: int) -> tuple[str, ...]:
    """Return the option to write rows of `length` past the caches, or no option.

    It suits a result that fills the last cache together with an operand of the same size: the cache
    need not read a line before it is overwritten, and it keeps the rows to be read next.
    """
    large = 4 * math.prod(result.shape) >= device.last_cache_nbytes // 2
    processor = device.kind == device.family == "cpu" and not device.checks_memory
    return (PAST_CACHES,) if processor and large and length % LINE == 0 else ()
