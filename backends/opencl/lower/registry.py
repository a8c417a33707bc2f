"""Registry of lowerings: a function for each operator.

A module of `ops/` registers its lowerings when it is imported:

    @lowers("aten.mm.default", supports=why_not)
    def matmul(builder: Builder, node: fx.Node) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import fx

from .builder import Builder

Lower = Callable[[Builder, fx.Node], None]
Supports = Callable[[fx.Node], str | None]


@dataclass(frozen=True)
class Lowering:
    """The lowering of an operator, and a function with the reason to refuse a node."""

    lower: Lower
    supports: Supports | None = None
    kept: bool = False
    """Whether graphs keep the operator, since it has a dedicated kernel."""


LOWERINGS: dict[str, Lowering] = {}
"""Stock lowerings, which each OpenCL backend extends; see `OpenCLBackend.lowerings`."""


def lowers(
    *operators: str, supports: Supports | None = None, kept: bool = False
) -> Callable[[Lower], Lower]:
    """Register a lowering for operators such as `aten.mm.default`, or `getitem`.

    `supports` returns the reason why a node cannot be lowered, or None if it can. `kept` operators
    have dedicated kernels, and are not decomposed. Raises `ValueError` if an operator already has
    a lowering.
    """

    def register(lower: Lower) -> Lower:
        for operator in operators:
            if operator in LOWERINGS:
                first = LOWERINGS[operator].lower
                raise ValueError(f"{operator} is lowered by {first.__module__} already")
            LOWERINGS[operator] = Lowering(lower, supports, kept)
        return lower

    return register


def kept_operators(lowerings: Mapping[str, Lowering] = LOWERINGS) -> frozenset[str]:
    """Return the operators of a table that are not decomposed."""
    return frozenset(name for name, lowering in lowerings.items() if lowering.kept)
