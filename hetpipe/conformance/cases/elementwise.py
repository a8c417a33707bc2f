"""Cases of elementwise operators: arithmetic, comparisons, activations and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hetpipe.conformance.cases.case import aten, grads, table

case = table("elementwise")

unary = "abs neg sign exp expm1 sin cos tanh sigmoid erf floor ceil round trunc relu square"
for name in unary.split():
    case(name, getattr(aten, name).default, "3x1x5")
for name in ["sqrt", "rsqrt", "log", "log1p", "log2", "reciprocal"]:
    case(name, getattr(aten, name).default, "+7")
case("isnan_isinf", lambda a: (aten.isnan(a), aten.isinf(a / 0.0), aten.isnan(a / a)), "5")
case("scalar_0d", lambda a, b: (a + b, a * 2, -a, (a > b), a.exp()), "() ()")
for name in ["add", "sub", "mul", "div", "maximum", "minimum", "atan2"]:
    op = getattr(aten, name)
    op = op.Tensor if "Tensor" in op.overloads() else op.default
    case(f"{name}_broadcast", op, "4x1x3 +2x1")
case("add_alpha", lambda a, b: (aten.add(a, b, alpha=2), aten.sub(a, b, alpha=0.5)), "5 5")
case("add_scalar", lambda a: (a + 1.5, a - 2, 3 - a, a / 4, 1 / a, a * -2), "+6")
arithmetic = ["add", "sub", "mul", "div"]
case("aten_scalar", lambda a: tuple(getattr(aten, n).Scalar(a, 2.5) for n in arithmetic), "6")
case("pow", lambda a: (a**2, a**0.5, a**-1, a**3, aten.pow.Scalar(2.0, a)), "+6")
case("pow_tensor", lambda a, b: a**b, "+6 6")
case(
    "mod",
    lambda a, b: (aten.fmod(a, b), aten.remainder(a, b), aten.fmod(a, 0.7), aten.remainder(a, 0.7)),
    "9 +9",
    tolerance=64.0,
)
case(
    "div_mode",
    lambda a, b: (
        aten.div(a, b, rounding_mode="floor"),
        aten.div(a, b, rounding_mode="trunc"),
        aten.div.Scalar_mode(a, 3, rounding_mode="floor"),
    ),
    "20:6 +6",
)
comparisons = ["eq", "ne", "lt", "le", "gt", "ge"]
case("compare", lambda a, b: tuple(getattr(aten, n).Tensor(a, b) for n in comparisons), "3:4x3 3:3")
case("compare_scalar", lambda a: tuple(getattr(aten, n).Scalar(a, 1) for n in comparisons), "3:8")
case(
    "logical",
    lambda a, b: (
        a & b,
        a | b,
        a ^ b,
        ~a,
        aten.logical_not(a),
        aten.logical_and(a, b),
        aten.logical_or(a, b),
        aten.logical_xor(a, b),
    ),
    "?6 ?6",
)
case("bitwise_int", lambda a, b: (a & b, a | b, a ^ b, ~a, a & 3, a | 4, a ^ 1), "99:6 99:6")
case("integers", lambda a, b: (a + b, a - b, a * b, a + 3, a * 2, a.float() / b, -a), "50:5 +5")
case(
    "where",
    lambda m, a, b: (torch.where(m, a, b), torch.where(m, a, 0.0), torch.where(m, 1.0, b)),
    "?4x3 3 4x1",
)
case(
    "masked_fill",
    lambda a, m: (a.masked_fill(m, -1.5), a.masked_fill(m, a.sum())),
    "4x3 ?4x1",
    terms=12,
)
case(
    "clamp",
    lambda a: (
        a.clamp(-0.5, 0.5),
        a.clamp(min=0),
        a.clamp(max=0.3),
        aten.clamp_min(a, 0.1),
        aten.clamp_max(a, 0.1),
    ),
    "9",
)
case("clamp_tensor", lambda a, b: aten.clamp.Tensor(a, b, b + 1), "9 9")
case(
    "lerp",
    lambda a, b, w: (aten.lerp(a, b, 0.1), aten.lerp(a, b, 0.9), aten.lerp(a, b, w)),
    "6 6 6",
)
case(
    "addcmul",
    lambda a, b, c: (aten.addcmul(a, b, c, value=-0.5), aten.addcmul(a, b, c)),
    "4x3 3 4x1",
)
case("addcdiv", lambda a, b, c: aten.addcdiv(a, b, c, value=0.1), "4x3 3 +4x1")
case(
    "casts",
    lambda a, b, c: (
        a.to(torch.int64),
        a.to(torch.bool),
        b.to(torch.float32),
        c.to(torch.float32),
        c.to(torch.int32),
        b.to(torch.int32),
    ),
    "6 9:6 ?6",
)
case(
    "activations",
    lambda a: (
        F.gelu(a),
        F.gelu(a, approximate="tanh"),
        F.silu(a),
        F.leaky_relu(a, 0.2),
        F.elu(a, 1.5),
        F.hardtanh(a),
        F.softplus(a),
        F.mish(a),
    ),
    "4x5",
)
activations: dict[str, Callable[..., torch.Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "leaky_relu": F.leaky_relu,
    "elu": lambda a: F.elu(a, 1.5),
    "hardtanh": F.hardtanh,
    "exp": torch.exp,
    "abs": torch.abs,
    "square": torch.square,
}
for name, fn in activations.items():
    case(f"{name}_backward", grads(fn, 1), "4x5 4x5")
case(
    "copy_fill",
    lambda a, b: (
        aten.copy(a, b),
        aten.fill(a, 2.0),
        aten.clone(a),
        aten.alias(a) + 1,
        aten.detach(a) + 1,
        aten.lift_fresh_copy(a),
    ),
    "4x3 3",
)
case(
    "clamp_one_side",
    lambda a, b: (
        aten.clamp_min.Tensor(a, b),
        aten.clamp_max.Tensor(a, b),
        aten.fill.Tensor(a, b[0]),
    ),
    "9 9",
)
