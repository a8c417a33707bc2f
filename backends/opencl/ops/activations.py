"""Activations of several terms: gelu, leaky_relu and elu."""

from __future__ import annotations

import functools
import math

from torch import fx

from hetpipe.sdk.graph import operator_name

from ..lower.builder import Builder
from ..lower.expr import DEAR
from ..lower.registry import lowers
from ._common import argument, choose, operands
from .elementwise import ARITHMETIC, erf_plus_one


@lowers("aten.gelu.default")
def gelu(builder: Builder, node: fx.Node) -> None:
    (x,) = operands(builder, node, node.args[:1])
    if argument(node, 1, "approximate", "none") == "tanh":
        cubic = "({T})(0.7978845608028654f) * ({0} + ({T})(0.044715f) * {0} * {0} * {0})"
        code = f"({{T}})(0.5f) * {{0}} * (({{T}})(1) + tanh({cubic}))"
        if x.dtype == "float64":
            code = functools.reduce(lambda c, d: c.replace(f"{d}f", d), "0123456789", code)
        expr = builder.apply(code, x.dtype, x, weight=2 * DEAR)
    else:
        # x times the normal distribution function, from terms that the derivative can share
        times, weight = ARITHMETIC["mul"]
        x, root, half = operands(builder, node, (node.args[0], math.sqrt(0.5), 0.5))
        twice = erf_plus_one(builder, builder.apply(times, x.dtype, x, root, weight=weight))
        below = builder.apply(times, x.dtype, twice, half, weight=weight)
        expr = builder.apply(times, x.dtype, x, below, weight=weight, alone="gelu({0})")
    builder.define(node, expr)


@lowers("aten.leaky_relu.default", "aten.elu.default")
def leaky(builder: Builder, node: fx.Node) -> None:
    if operator_name(node) == "aten.leaky_relu.default":
        slope = argument(node, 1, "negative_slope", 0.01)
        x, slope = operands(builder, node, (node.args[0], slope))
        low = builder.apply("{0} * {1}", x.dtype, x, slope)
    else:
        alpha, scale = argument(node, 1, "alpha", 1.0), argument(node, 2, "scale", 1.0)
        inner = argument(node, 3, "input_scale", 1.0)
        x, a, s, i = operands(builder, node, (node.args[0], alpha, scale, inner))
        low = builder.apply("{1} * {2} * expm1({0} * {3})", x.dtype, x, a, s, i, weight=DEAR)
        x = builder.apply("{0} * {1}", x.dtype, x, s)
    (zero,) = operands(builder, node, [0])
    positive = builder.apply("abs(convert_{M}({0} > {1}))", "bool", x, zero)
    builder.define(node, choose(builder, positive, x, low))
