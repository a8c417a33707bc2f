"""Operators that work element by element. Each is a piece of C code; codegen fuses them.

`{0}` is the first operand, `{T}` the C type of the result (a vector of 16, or one element),
`{M}` the signed integer type of the same width. A true comparison gives 1 for one element and -1
in a vector, and `abs` turns -1 into 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hetpipe.sdk.graph import dtype_name, operator_name, why_not_fill

from ..lower.builder import Builder, node_dtype, node_shape
from ..lower.expr import DEAR, Apply, Const, Expr
from ..lower.registry import lowers
from ._common import FLOATS, UNSIGNED, argument, cast, choose, operands, truth

ARITHMETIC = {
    "mul": ("{0} * {1}", 1),
    "div": ("{0} / {1}", 4),
    "atan2": ("atan2({0}, {1})", DEAR),
    "maximum": ("select({0}, {1}, convert_{M}(({0} < {1}) | ({1} != {1})))", 1),
    "minimum": ("select({0}, {1}, convert_{M}(({0} > {1}) | ({1} != {1})))", 1),
    "bitwise_and": ("{0} & {1}", 1),
    "bitwise_or": ("{0} | {1}", 1),
    "bitwise_xor": ("{0} ^ {1}", 1),
}
ERF = "exact_erf({0})"
EXP_MINUS_SQUARE = "exp_minus_square({0})"
MINUS = "-{0}"
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
LOGIC = {"logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}"}
FUNCTIONS = {
    "neg": (MINUS, 1),
    "reciprocal": ("({T})(1) / {0}", 4),
    "sqrt": ("sqrt({0})", 4),
    "rsqrt": ("rsqrt({0})", 4),
    "erf": (ERF, DEAR),
    "exp": ("exact_exp({0})", DEAR),
    "sigmoid": ("({T})(1) / (({T})(1) + exact_exp(-{0}))", DEAR),
    "silu": ("{0} / (({T})(1) + exact_exp(-{0}))", DEAR),
    "relu": ("select({0}, ({T})(0), convert_{M}({0} < ({T})(0)))", 1),
    "sign": ("sign({0})", 1),
    "sgn": ("sign({0})", 1),
    "floor": ("floor({0})", 1),
    "ceil": ("ceil({0})", 1),
    "trunc": ("trunc({0})", 1),
    "round": ("rint({0})", 1),
    **{name: (f"exact_{name}({{0}})", DEAR) for name in ("sin", "cos", "tan")},
    **{
        name: (f"{name}({{0}})", DEAR)
        for name in (
            "exp2", "log", "log2", "log10", "log1p", "expm1", "tanh", "lgamma", "erfc",
            "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh",
        )
    },
}  # fmt: skip
POWERS = {
    0.0: "({T})(1)", 1.0: "{0}", 2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "sqrt({0})",
    -0.5: "rsqrt({0})", -1.0: "({T})(1) / {0}", -2.0: "({T})(1) / ({0} * {0})",
}  # fmt: skip
FLOATING = {name: (f"{name}({{0}}, {{1}})", DEAR) for name in ("hypot", "nextafter", "copysign",
                                                               "fmax", "fmin")}  # fmt: skip
"""C functions of two floats."""


def _names(table: Any, *overloads: str) -> list[str]:
    return [f"aten.{name}.{overload}" for name in table for overload in overloads]


def _stem(node: fx.Node) -> str:
    return operator_name(node).split(".")[1]


def _floats_only(node: fx.Node) -> str | None:
    dtype = node_dtype(node)
    return None if dtype in FLOATS else f"its kernels compute in floats, not in {dtype}"


@lowers("aten.add.Tensor", "aten.add.Scalar", "aten.sub.Tensor", "aten.sub.Scalar")
def add(builder: Builder, node: fx.Node) -> None:
    alpha = argument(node, 2, "alpha", 1)
    a, b, scale = operands(builder, node, (*node.args[:2], alpha))
    sign = "+" if _stem(node) == "add" else "-"
    is_one = isinstance(b, Const) and b.number == 1 and alpha == 1
    if is_one and sign == "+" and isinstance(a, Apply) and a.code == ERF:
        expr = erf_plus_one(builder, *a.args)
    elif alpha == 1:
        expr = builder.apply(f"{{0}} {sign} {{1}}", a.dtype, a, b)
    else:
        expr = builder.apply(f"{{0}} {sign} {{2}} * {{1}}", a.dtype, a, b, scale, weight=2)
    builder.define(node, truth(builder, expr) if expr.dtype == "bool" else expr)


def erf_plus_one(builder: Builder, x: Expr) -> Expr:
    """Return erf(x) + 1, computed from exp(-x^2), which the derivative also needs."""
    density = builder.apply(EXP_MINUS_SQUARE, x.dtype, x, weight=DEAR)
    return builder.apply("erf_plus_one({0}, {1})", x.dtype, x, density, weight=DEAR)


@lowers("aten.rsub.Scalar", "aten.rsub.Tensor")
def reversed_sub(builder: Builder, node: fx.Node) -> None:
    a, b, alpha = operands(builder, node, (*node.args[:2], argument(node, 2, "alpha", 1)))
    builder.define(node, builder.apply("{1} - {2} * {0}", a.dtype, a, b, alpha))


@lowers(*_names(ARITHMETIC, "Tensor", "Scalar"), "aten.maximum.default", "aten.minimum.default",
        "aten.atan2.default")  # fmt: skip
@lowers("aten.copysign.Tensor", "aten.copysign.Scalar", "aten.hypot.default",
        "aten.nextafter.default", "aten.fmax.default", "aten.fmin.default",
        supports=_floats_only)  # fmt: skip
def arithmetic(builder: Builder, node: fx.Node) -> None:
    code, weight = {**ARITHMETIC, **FLOATING}[_stem(node)]
    a, b = operands(builder, node, node.args[:2])
    expr = builder.apply(code, a.dtype, a, b, weight=weight)
    builder.define(node, truth(builder, expr) if expr.dtype == "bool" else expr)


@lowers("aten.signbit.default")
def signbit(builder: Builder, node: fx.Node) -> None:
    a = builder.expr(node.args[0])
    a, zero = operands(builder, node, (node.args[0], 0), a.dtype)
    code = "signbit({0})" if a.dtype in FLOATS else "{0} < {1}"
    builder.define(node, builder.apply(f"abs(convert_{{M}}({code}))", "bool", a, zero))


@lowers(*_names(COMPARISONS, "Tensor", "Scalar"))
def comparison(builder: Builder, node: fx.Node) -> None:
    values: Any = [arg.meta["val"] if isinstance(arg, fx.Node) else arg for arg in node.args[:2]]
    a, b = operands(builder, node, node.args[:2], dtype_name(torch.result_type(*values)))
    code = f"abs(convert_{{M}}({{0}} {COMPARISONS[_stem(node)]} {{1}}))"
    builder.define(node, builder.apply(code, "bool", a, b))


@lowers(*_names(LOGIC, "default"))
def logic(builder: Builder, node: fx.Node) -> None:
    a, b = operands(builder, node, node.args[:2], "bool")
    builder.define(node, builder.apply(LOGIC[_stem(node)], "bool", a, b))


@lowers("aten.logical_not.default", "aten.bitwise_not.default")
def negation(builder: Builder, node: fx.Node) -> None:
    (a,) = operands(builder, node, node.args[:1])
    code = "{0} ^ ({T})(1)" if a.dtype == "bool" else "~{0}"
    builder.define(node, builder.apply(code, a.dtype, a))


@lowers("aten.isnan.default", "aten.isinf.default", "aten.isfinite.default")
def classify(builder: Builder, node: fx.Node) -> None:
    a = builder.expr(node.args[0])
    code = f"abs(convert_{{M}}({_stem(node)}({{0}})))"
    a = a if a.dtype in FLOATS else cast(builder, a, "float32")
    builder.define(node, builder.apply(code, "bool", a))


@lowers(*_names(FUNCTIONS, "default"))
def function(builder: Builder, node: fx.Node) -> None:
    name = _stem(node)
    code, weight = FUNCTIONS[name]
    (a,) = operands(builder, node, node.args[:1])
    root = _root_of_minus_square(a) if name == "exp" else None
    if root is not None:
        a, code = root, EXP_MINUS_SQUARE
    if a.dtype not in FLOATS:
        rounding = name in ("floor", "ceil", "trunc", "round")
        lowest = "0" if a.dtype in UNSIGNED else "-1"  # as unsigned, -1 would exceed the high bound
        signed = f"clamp({{0}}, ({{T}})({lowest}), ({{T}})(1))"
        code = "{0}" if rounding else signed if name in ("sign", "sgn") else code
    builder.define(node, builder.apply(code, a.dtype, a, weight=weight))


def _root_of_minus_square(expr: Expr) -> Expr | None:
    """Return x if `expr` is -(x * x), else None."""
    if not isinstance(expr, Apply) or expr.code != MINUS:
        return None
    (square,) = expr.args
    if not isinstance(square, Apply) or square.code != ARITHMETIC["mul"][0]:
        return None
    a, b = square.args
    return a if a is b else None


@lowers("aten.abs.default")
def absolute(builder: Builder, node: fx.Node) -> None:
    (a,) = operands(builder, node, node.args[:1])
    code = "fabs({0})" if a.dtype in FLOATS else "convert_{T}(abs({0}))"
    builder.define(node, builder.apply(code, a.dtype, a))


@lowers(
    "aten.pow.Tensor_Scalar", "aten.pow.Tensor_Tensor", "aten.pow.Scalar", supports=_floats_only
)
def power(builder: Builder, node: fx.Node) -> None:
    a, b = operands(builder, node, node.args[:2])
    exponent = node.args[1]
    if isinstance(exponent, (int, float)) and float(exponent) in POWERS:
        code = POWERS[float(exponent)]
        builder.define(node, builder.apply(code, a.dtype, a, weight=4 if "r" in code else 2))
    elif a.numel == 1 and "float64" in builder.device.info.dtypes:
        # In an optimizer, 1 - beta^step loses three digits; for one element doubles are cheap.
        wide = [cast(builder, item, "float64") for item in (a, b)]
        exact = builder.apply("exact_pow({0}, {1})", "float64", *wide, weight=2 * DEAR)
        builder.define(node, cast(builder, exact, a.dtype))
    else:
        builder.define(node, builder.apply("exact_pow({0}, {1})", a.dtype, a, b, weight=2 * DEAR))


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar",
        "aten.masked_fill.Scalar", "aten.masked_fill.Tensor")  # fmt: skip
def where(builder: Builder, node: fx.Node) -> None:
    fills = _stem(node) == "masked_fill"  # (x, mask, value); otherwise (condition, yes, no)
    mask = cast(builder, builder.expr(node.args[int(fills)], node_shape(node)), "bool")
    first, last = operands(builder, node, (node.args[0 if fills else 1], node.args[2]))
    yes, no = (last, first) if fills else (first, last)
    builder.define(node, choose(builder, mask, yes, no))


@lowers(*_names(("clamp", "clamp_min", "clamp_max"), "default", "Tensor"), "aten.hardtanh.default")
def clamp(builder: Builder, node: fx.Node) -> None:
    name = _stem(node)
    tanh = name == "hardtanh"
    low = argument(node, 1, "min_val" if tanh else "min", -1.0 if tanh else None)
    high = argument(node, 2, "max_val" if tanh else "max", 1.0 if tanh else None)
    if name == "clamp_max":
        low, high = None, argument(node, 1, "max")
    (expr,) = operands(builder, node, node.args[:1])
    for bound, sign in ((low, "<"), (high, ">")):
        if bound is not None:
            (limit,) = operands(builder, node, [bound])
            # A tensor of bounds may have NaN, which replaces every number.
            passes = f"({{0}} {sign} {{1}})"
            passes += " | ({1} != {1})" if isinstance(bound, fx.Node) else ""
            code = f"select({{0}}, {{1}}, convert_{{M}}({passes}))"
            expr = builder.apply(code, expr.dtype, expr, limit)
    builder.define(node, expr)


@lowers("aten.threshold_backward.default")
def threshold_backward(builder: Builder, node: fx.Node) -> None:
    gradient, x, threshold = operands(builder, node, node.args[:3])
    passes = builder.apply("abs(convert_{M}({0} > {1}))", "bool", x, threshold)
    (zero,) = operands(builder, node, [0])
    builder.define(node, choose(builder, passes, gradient, zero))


@lowers("aten.lerp.Scalar", "aten.lerp.Tensor")
def lerp(builder: Builder, node: fx.Node) -> None:
    a, b, weight = operands(builder, node, node.args[:3])
    # Start from the nearer end, so that the ends themselves are exact.
    near, far = "{0} + {2} * ({1} - {0})", "{1} - ({1} - {0}) * (({T})(1) - {2})"
    code = f"select({far}, {near}, convert_{{M}}(fabs({{2}}) < ({{T}})(0.5f)))"
    builder.define(node, builder.apply(code, a.dtype, a, b, weight, weight=6))


@lowers("aten.addcmul.default", "aten.addcdiv.default")
def add_product(builder: Builder, node: fx.Node) -> None:
    sign, weight = ("*", 2) if _stem(node) == "addcmul" else ("/", 5)
    args = (*node.args[:3], argument(node, 3, "value", 1))
    a, b, c, scale = operands(builder, node, args)
    code = f"{{0}} + {{3}} * ({{1}} {sign} {{2}})"
    builder.define(node, builder.apply(code, a.dtype, a, b, c, scale, weight=weight))


@lowers(*_names(("_to_copy", "clone", "alias", "detach", "lift_fresh_copy"), "default"))
@lowers("aten.copy.default", "aten.fill.Scalar")
def copy(builder: Builder, node: fx.Node) -> None:
    """Result: the operand in the node's dtype; for copy and fill, the values that overwrite it."""
    at = int(_stem(node) in ("copy", "fill"))
    (expr,) = operands(builder, node, node.args[at : at + 1])
    builder.define(node, expr)


@lowers("aten.fill.Tensor", supports=why_not_fill)
def fill(builder: Builder, node: fx.Node) -> None:
    value = builder.view(builder.expr(node.args[1]), lambda layout: layout.reshape(()))
    builder.define(node, builder.expand(cast(builder, value, node_dtype(node)), node_shape(node)))
