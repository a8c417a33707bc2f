"""Formats numbers with units, for people: three significant digits."""

from __future__ import annotations

import math


def format_s(time_s: float) -> str:
    """0.00123 -> "1.23 ms"; infinite -> "-"."""
    if math.isinf(time_s):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if time_s * factor >= 1.0:
            return f"{time_s * factor:.3g} {unit}"
    return f"{time_s * 1e6:.3g} us"


def format_nbytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def format_rate(per_s: float) -> str:
    """1234.5 -> "1234/s"; small rates keep three digits."""
    return f"{per_s:.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"
