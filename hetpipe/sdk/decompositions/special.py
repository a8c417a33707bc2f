"""Decompositions of special functions: series, recurrences and Newton's steps, element by element.

The coefficients of the Bessel functions and of Euler and Maclaurin's sum come from the Cephes
library (S. L. Moshier, Methods and Programs for Mathematical Functions, 1989).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten
Tensor = torch.Tensor

I0_NEAR = (
    -4.41534164647933937950e-18, 3.33079451882223809783e-17, -2.43127984654795469359e-16,
    1.71539128555513303061e-15, -1.16853328779934516808e-14, 7.67618549860493561688e-14,
    -4.85644678311192946090e-13, 2.95505266312963983461e-12, -1.72682629144155570723e-11,
    9.67580903537323691224e-11, -5.18979560163526290666e-10, 2.65982372468238665035e-9,
    -1.30002500998624804212e-8, 6.04699502254191894932e-8, -2.67079385394061173391e-7,
    1.11738753912010371815e-6, -4.41673835845875056359e-6, 1.64484480707288970893e-5,
    -5.75419501008210370398e-5, 1.88502885095841655729e-4, -5.76375574538582365885e-4,
    1.63947561694133579842e-3, -4.32430999505057594430e-3, 1.05464603945949983183e-2,
    -2.37374148058994688156e-2, 4.93052842396707084878e-2, -9.49010970480476444210e-2,
    1.71620901522208775349e-1, -3.04682672343198398683e-1, 6.76795274409476084995e-1,
)  # fmt: skip
"""Coefficients of exp(-x) I0(x) for x in [0, 8], for Chebyshev polynomials of x / 2 - 2. In this
and the next three tables, the highest degree comes first."""
I0_FAR = (
    -7.23318048787475395456e-18, -4.83050448594418207126e-18, 4.46562142029675999901e-17,
    3.46122286769746109310e-17, -2.82762398051658348494e-16, -3.42548561967721913462e-16,
    1.77256013305652638360e-15, 3.81168066935262242075e-15, -9.55484669882830764870e-15,
    -4.15056934728722208663e-14, 1.54008621752140982691e-14, 3.85277838274214270114e-13,
    7.18012445138366623367e-13, -1.79417853150680611778e-12, -1.32158118404477131188e-11,
    -3.14991652796324136454e-11, 1.18891471078464383424e-11, 4.94060238822496958910e-10,
    3.39623202570838634515e-9, 2.26666899049817806459e-8, 2.04891858946906374183e-7,
    2.89137052083475648297e-6, 6.88975834691682398426e-5, 3.36911647825569408990e-3,
    8.04490411014108831608e-1,
)  # fmt: skip
"""Coefficients of exp(-x) sqrt(x) I0(x) for x beyond 8, for polynomials of 32 / x - 2."""
I1_NEAR = (
    2.77791411276104639959e-18, -2.11142121435816608115e-17, 1.55363195773620046921e-16,
    -1.10559694773538630805e-15, 7.60068429473540693410e-15, -5.04218550472791168711e-14,
    3.22379336594557470981e-13, -1.98397439776494371520e-12, 1.17361862988909016308e-11,
    -6.66348972350202774223e-11, 3.62559028155211703701e-10, -1.88724975172282928790e-9,
    9.38153738649577178388e-9, -4.44505912879632808065e-8, 2.00329475355213526229e-7,
    -8.56872026469545474066e-7, 3.47025130813767847674e-6, -1.32731636560394358279e-5,
    4.78156510755005422638e-5, -1.61760815825896745588e-4, 5.12285956168575772895e-4,
    -1.51357245063125314899e-3, 4.15642294431288815669e-3, -1.05640848946261981558e-2,
    2.47264490306265168283e-2, -5.29459812080949914269e-2, 1.02643658689847095384e-1,
    -1.76416518357834055153e-1, 2.52587186443633654823e-1,
)  # fmt: skip
"""Coefficients of exp(-x) I1(x) / x for x in [0, 8]."""
I1_FAR = (
    7.51729631084210481353e-18, 4.41434832307170791151e-18, -4.65030536848935832153e-17,
    -3.20952592199342395980e-17, 2.96262899764595013876e-16, 3.30820231092092828324e-16,
    -1.88035477551078244854e-15, -3.81440307243700780478e-15, 1.04202769841288027642e-14,
    4.27244001671195135429e-14, -2.10154184277266431302e-14, -4.08355111109219731823e-13,
    -7.19855177624590851209e-13, 2.03562854414708950722e-12, 1.41258074366137813316e-11,
    3.25260358301548823856e-11, -1.89749581235054123450e-11, -5.58974346219658380687e-10,
    -3.83538038596423702205e-9, -2.63146884688951950684e-8, -2.51223623787020892529e-7,
    -3.88256480887769039346e-6, -1.10588938762623716291e-4, -9.76109749136146840777e-3,
    7.78576235018280120474e-1,
)  # fmt: skip
"""Coefficients of exp(-x) sqrt(x) I1(x) for x beyond 8."""
BORDER = 8.0
ZETA_TERMS = 10
"""Terms of Hurwitz' zeta function to add one by one."""
BERNOULLI = (
    12.0, -720.0, 30240.0, -1209600.0, 47900160.0, -1.8924375803183791606e9, 7.47242496e10,
    -2.950130727918164224e12, 1.1646782814350067249e14, -4.5979787224074726105e15,
    1.8152105401943546773e17, -7.1661652561756670113e18,
)  # fmt: skip
"""(2k)! / B_2k, in the formula for the remaining terms of the zeta function."""


def _floating(x: Tensor) -> Tensor:
    return x if x.is_floating_point() else x.to(torch.get_default_dtype())


def _chebyshev(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Evaluate a Chebyshev sum by Clenshaw's recurrence, without terms too small for the dtype."""
    least = torch.finfo(x.dtype).eps / 16
    first = next(at for at, each in enumerate(coefficients) if abs(each) > least)
    now = before = last = torch.zeros_like(x)
    for each in coefficients[first:]:
        last, before = before, now
        now = x * before - last + each
    return 0.5 * (now - last)


def _scaled_bessel(x: Tensor, near: Sequence[float], far: Sequence[float], odd: bool) -> Tensor:
    """Return exp(-|x|) I(x)."""
    size = x.abs()
    inside = _chebyshev(size.clamp(max=BORDER) / 2 - 2, near)
    large = size.clamp(min=BORDER)
    outside = _chebyshev(32 / large - 2, far) / large.sqrt()
    value = torch.where(size <= BORDER, inside * size if odd else inside, outside)
    value = torch.where(torch.isnan(x), x, value)
    return torch.where(x < 0, -value, value) if odd else value


def i0e(x: Tensor) -> Tensor:
    """Return the modified Bessel function of order 0, times exp(-|x|)."""
    return _scaled_bessel(_floating(x), I0_NEAR, I0_FAR, odd=False)


def i1e(x: Tensor) -> Tensor:
    """Return the modified Bessel function of order 1, times exp(-|x|)."""
    return _scaled_bessel(_floating(x), I1_NEAR, I1_FAR, odd=True)


def i0(x: Tensor) -> Tensor:
    """Return the modified Bessel function of order 0."""
    x = _floating(x)
    return x.abs().exp() * i0e(x)


def i1(x: Tensor) -> Tensor:
    """Return the modified Bessel function of order 1."""
    x = _floating(x)
    return x.abs().exp() * i1e(x)


def _zeta(x: float, q: Tensor) -> Tensor:
    """Return Hurwitz' zeta, the sum of (q + k)^-x for positive q, by Euler and Maclaurin's sum."""
    total = torch.zeros_like(q)
    for k in range(ZETA_TERMS):
        total = total + torch.pow(q + k, -x)
    far = q + ZETA_TERMS
    power = torch.pow(far, -x)
    total = total + torch.pow(far, 1 - x) / (x - 1) + 0.5 * power
    factor, power = x, power / far
    for k, bernoulli in enumerate(BERNOULLI):
        total = total + power * (factor / bernoulli)
        factor = factor * (x + 2 * k + 1) * (x + 2 * k + 2)
        power = power / (far * far)
    return total


def _cotangent_derivative(n: int, t: Tensor) -> Tensor:
    """Return the n-th derivative of cot at t.

    Every derivative is a polynomial of c = cot t. The derivative of a polynomial with respect to t
    is -(1 + c^2) times its derivative with respect to c.
    """
    polynomial = [0.0, 1.0]
    for _ in range(n):
        slope = [at * each for at, each in enumerate(polynomial)][1:]
        polynomial = [0.0] * (len(slope) + 2)
        for at, each in enumerate(slope):
            polynomial[at] -= each
            polynomial[at + 2] -= each
    cotangent, value = 1 / torch.tan(t), torch.zeros_like(t)
    for each in reversed(polynomial):
        value = value * cotangent + each
    return value


SHIFT, WIDE_SHIFT = 6, 10
"""Steps of the recurrence after which the asymptotic series of `digamma` is exact enough, in
float32 and in float64."""


def digamma(x: Tensor) -> Tensor:
    """Return the derivative of lgamma, by reflection, recurrence and the asymptotic series.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 6.3.5, 6.3.7 and 6.3.18.
    """
    negative = x < 0
    positive = torch.where(negative, 1 - x, x)
    total = torch.zeros_like(x)
    shift = WIDE_SHIFT if x.dtype == torch.float64 else SHIFT
    for step in range(shift):
        total = total - 1 / (positive + step)
    far = positive + shift
    square = 1 / (far * far)
    tail = 1 / 240 - square * (1 / 132 - square * (691 / 32760 - square / 12))
    tail = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square * tail)))
    total = total + torch.log(far) - 0.5 / far - tail
    part = x - torch.round(x)  # the tangent of a large number is not exact
    reflected = total - math.pi / torch.tan(math.pi * part)
    pole = negative & (part == 0)
    result = torch.where(negative, reflected, total)
    result = torch.where(pole, torch.full_like(x, math.nan), result)
    return torch.where(x == 0, torch.copysign(torch.full_like(x, math.inf), -x), result)


def polygamma(n: int, x: Tensor) -> Tensor:
    """Return the n-th derivative of digamma (Abramowitz and Stegun, 6.4.7 and 6.4.10)."""
    x = _floating(x)
    if n == 0:
        return torch.digamma(x)
    sign = 1.0 if n % 2 else -1.0
    value = sign * math.factorial(n) * _zeta(n + 1.0, torch.where(x < 0.5, 1 - x, x))
    part = x - torch.round(x)  # the tangent of a large number is not exact
    reflected = -sign * value - math.pi ** (n + 1) * _cotangent_derivative(n, math.pi * part)
    value = torch.where(x < 0.5, reflected, value)
    pole = (x <= 0) & (part == 0)
    return torch.where(pole, torch.full_like(x, sign * math.inf), value)


def erfinv(y: Tensor) -> Tensor:
    """Return the inverse of erf, by a rational function (G. L. Pavlis) and two Newton steps."""
    y = _floating(y)
    size = y.abs()
    z = y * y
    above = ((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899
    below = (((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1
    central = y * above / below
    z = torch.sqrt(-torch.log((1 - size) / 2))
    above = ((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454
    tail = torch.copysign(above, y) / ((1.637067800 * z + 3.543889200) * z + 1)
    x = torch.where(size <= 0.7, central, tail)
    for _ in range(2):
        # Near 1, erf loses digits that erfc = 1 - erf keeps.
        beyond = torch.sign(y) * ((1 - size) - torch.erfc(x.abs()))
        error = torch.where(size <= 0.5, torch.erf(x) - y, beyond)
        x = x - error / (2 / math.sqrt(math.pi) * torch.exp(-x * x))
    x = torch.where(size == 1, torch.copysign(torch.full_like(x, math.inf), y), x)
    return torch.where((size > 1) | torch.isnan(y), torch.full_like(x, math.nan), x)


FRACTION_TERMS = 30
"""Terms of the continued fraction of `erfcx` beyond 2."""


def erfcx(x: Tensor) -> Tensor:
    """Return exp(x^2) erfc(x); from 2 on as a continued fraction (Abramowitz, Stegun, 7.1.14)."""
    x = _floating(x)
    size = x.abs()
    near = size.clamp(max=2.0)
    inside = torch.exp(near * near) * torch.erfc(near)
    far = rest = size.clamp(min=2.0)
    for k in range(FRACTION_TERMS, 0, -1):
        rest = far + 0.5 * k / rest
    value = torch.where(size < 2, inside, 1 / (math.sqrt(math.pi) * rest))
    value = torch.where(x < 0, 2 * torch.exp(x * x) - value, value)
    return torch.where(torch.isnan(x), x, value)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    aten.i0.default: i0, aten.special_i0e.default: i0e, aten.special_i1.default: i1,
    aten.special_i1e.default: i1e, aten.special_modified_bessel_i0.default: i0,
    aten.special_modified_bessel_i1.default: i1, aten.digamma.default: digamma,
    aten.polygamma.default: polygamma, aten.erfinv.default: erfinv,
    aten.special_erfcx.default: erfcx,
}  # fmt: skip
