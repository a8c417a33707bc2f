"""The ways to reduce two elements to one, as C code."""

from __future__ import annotations

from dataclasses import dataclass

from .body import type_names

EXTREMES = {
    "float32": ("-INFINITY", "INFINITY"), "float64": ("-INFINITY", "INFINITY"),
    "int64": ("LONG_MIN", "LONG_MAX"), "int32": ("INT_MIN", "INT_MAX"),
    "int16": ("SHRT_MIN", "SHRT_MAX"), "int8": ("CHAR_MIN", "CHAR_MAX"),
    "uint8": ("0", "UCHAR_MAX"), "bool": ("0", "1"),
}  # fmt: skip


@dataclass(frozen=True)
class Reduction:
    """C code that reduces two elements to one; `neutral` is the neutral element."""

    code: str
    neutral: str

    def start(self, dtype: str) -> str:
        """Return the neutral element of a dtype."""
        low, high = EXTREMES[dtype]
        return self.neutral.replace("LOWEST", low).replace("HIGHEST", high)

    def join(self, dtype: str, width: int, a: str, b: str) -> str:
        """Return the code that reduces `a` and `b`, each one element or a vector."""
        return self.code.format(a, b, **type_names(dtype, width))


SUM = Reduction("{0} + {1}", "0")
PRODUCT = Reduction("{0} * {1}", "1")
ANY = Reduction("{0} | {1}", "0")
ALL = Reduction("{0} & {1}", "1")
MAXIMUM = Reduction("select({0}, {1}, convert_{M}(({0} < {1}) | ({1} != {1})))", "LOWEST")
MINIMUM = Reduction("select({0}, {1}, convert_{M}(({0} > {1}) | ({1} != {1})))", "HIGHEST")
