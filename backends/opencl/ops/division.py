"""Rounded divisions and remainders: exact, and without the traps of integer division."""

from __future__ import annotations

from torch import fx

from hetpipe.sdk.graph import operator_name

from ..lower.builder import Builder
from ..lower.expr import DEAR, Expr
from ..lower.registry import lowers
from ._common import FLOATS, UNSIGNED, operands

OTHER_SIGN = "({0} != ({T})(0)) & (({0} < ({T})(0)) != ({1} < ({T})(0)))"
"""C code: whether remainder {0} is not 0, and its sign differs from the sign of divisor {1}."""


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode", "aten.floor_divide.default")
def rounded_div(builder: Builder, node: fx.Node) -> None:
    floor = operator_name(node) == "aten.floor_divide.default"
    mode = "floor" if floor else node.kwargs.get("rounding_mode")
    a, b = operands(builder, node, node.args[:2])
    if a.dtype not in FLOATS:
        result = _whole_quotient(builder, a, b, floored=mode == "floor")
    elif mode == "floor":
        result = _floored_quotient(builder, a, b)
    else:
        code = "{0} / {1}" if mode is None else "trunc({0} / {1})"
        result = builder.apply(code, a.dtype, a, b, weight=4)
    builder.define(node, result)


@lowers("aten.remainder.Scalar", "aten.remainder.Tensor", "aten.fmod.Scalar", "aten.fmod.Tensor")
def remainder(builder: Builder, node: fx.Node) -> None:
    a, b = operands(builder, node, node.args[:2])
    if a.dtype in FLOATS:
        rest = builder.apply("exact_fmod({0}, {1})", a.dtype, a, b, weight=DEAR)
    else:
        b = _harmless(builder, b)
        rest = builder.apply("{0} % {1}", a.dtype, a, b, weight=4)
    if "remainder" in operator_name(node):
        code = f"select({{0}}, ({{T}})({{0}} + {{1}}), convert_{{M}}({OTHER_SIGN}))"
        rest = builder.apply(code, a.dtype, rest, b, weight=2)
    builder.define(node, rest)


def _floored_quotient(builder: Builder, a: Expr, b: Expr) -> Expr:
    """Return the floored quotient of floats as torch computes it: (a - remainder) / b.

    floor(a / b) is one too large if a / b is rounded up to a whole number, as 1 / 0.1 is.
    """
    rest = builder.apply("exact_fmod({0}, {1})", a.dtype, a, b, weight=DEAR)
    less = f"select(({{T}})(0), ({{T}})(1), convert_{{M}}({OTHER_SIGN}))"
    share = builder.apply(f"({{2}} - {{0}}) / {{1}} - {less}", a.dtype, rest, b, a, weight=6)
    plain = builder.apply("{0} / {1}", a.dtype, a, b, weight=4)  # for b = 0 and the sign of 0
    code = "select(rint({0}), copysign(({T})(0), {1}), convert_{M}({0} == ({T})(0)))"
    whole = builder.apply(code, a.dtype, share, plain, weight=2)
    code = "select({0}, {1}, convert_{M}({2} == ({T})(0)))"
    return builder.apply(code, a.dtype, whole, plain, b)


def _whole_quotient(builder: Builder, a: Expr, b: Expr, floored: bool) -> Expr:
    """Return the quotient of integers, rounded down if `floored`, else towards zero as in C."""
    divisor = _harmless(builder, b)
    quotient = builder.apply("{0} / {1}", a.dtype, a, divisor, weight=4)
    if a.dtype in UNSIGNED:
        return quotient
    if floored:
        rest = builder.apply("{0} % {1}", a.dtype, a, divisor, weight=4)
        code = f"{{2}} - select(({{T}})(0), ({{T}})(1), convert_{{M}}({OTHER_SIGN}))"
        quotient = builder.apply(code, a.dtype, rest, divisor, quotient, weight=2)
    code = "select({0}, ({T})(-{1}), convert_{M}({2} == ({T})(-1)))"
    return builder.apply(code, a.dtype, quotient, a, b, weight=2)


def _harmless(builder: Builder, divisor: Expr) -> Expr:
    """Return the divisor, but 1 for 0 and -1: processors may trap at x / 0 and INT_MIN / -1."""
    traps = "({0} == ({T})(0))"
    if divisor.dtype not in UNSIGNED:
        traps += " | ({0} == ({T})(-1))"
    return builder.apply(
        f"select({{0}}, ({{T}})(1), convert_{{M}}({traps}))", divisor.dtype, divisor
    )
