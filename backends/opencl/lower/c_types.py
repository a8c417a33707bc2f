"""Names and literals of OpenCL C."""

from __future__ import annotations

import math

import numpy as np

C_TYPES = {
    "float64": "double", "float32": "float", "int64": "long", "int32": "int", "int16": "short",
    "int8": "char", "uint8": "uchar", "bool": "uchar", "float16": "float",
}  # fmt: skip
"""C types in which kernels compute each dtype; a bool is a byte, 0 or 1. float16 exists in memory
only: every OpenCL has `vload_half` and `vstore_half` to read and write it."""

MASKS = {"double": "long", "float": "int", "uchar": "char"}
"""The signed integer type of the same width, for each type that is not a signed integer."""


def literal(number: float | int | bool, dtype: str) -> str:
    """Return `number` as an exact literal of the C type of `dtype`.

    For an integer dtype a float is rounded towards zero, as in torch.
    """
    if dtype not in ("float16", "float32", "float64"):
        whole = int(bool(number)) if dtype == "bool" else int(number)
        if whole == -(2**63):
            return "(-9223372036854775807L - 1)"
        return f"{whole}L" if dtype == "int64" else str(whole)
    with np.errstate(over="ignore"):
        value = float(number) if dtype == "float64" else float(np.float32(number))
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return repr(value) + ("" if dtype == "float64" else "f")


def pointed(dtype: str) -> str:
    """Return the C type of an element of `dtype` in memory."""
    return "half" if dtype == "float16" else C_TYPES[dtype]


def vector(ctype: str, width: int) -> str:
    """Return the C type of `width` elements: `float16` for 16 floats, `float` for one."""
    return ctype if width == 1 else f"{ctype}{width}"
