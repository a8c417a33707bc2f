"""Differences between arrays and their references, and the errors that rounding explains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

UNITS = 16.0
"""The allowed error of a sum, in units of sqrt(terms) * eps * largest magnitude."""


@dataclass(frozen=True)
class Difference:
    """The worst error of an array, and the allowed error of the same element.

    `wrong` counts the elements with a larger error than allowed; `text` describes the worst
    element. The error is infinite for a wrong shape, or if value and reference differ and at least
    one of the two is not finite.
    """

    error: float
    allowed: float
    wrong: int = 0
    text: str = ""

    @property
    def is_wrong(self) -> bool:
        """Whether the error is larger than allowed."""
        return not self.error <= self.allowed


def errors_of(actual: Array, expected: Array) -> Array:
    """Return the absolute error of each element; 1 for unequal integers and bools.

    The error is 0 if both values are NaN, or if they are equal after `expected` is rounded to the
    dtype of `actual`, which may turn a large number into infinity. The error is infinite if the
    values differ and at least one of the two is not finite.
    """
    if actual.dtype.kind != "f":
        return np.asarray(actual != expected, np.float64)
    with np.errstate(all="ignore"):
        rounded = expected.astype(actual.dtype)
        is_same = (actual == rounded) | (np.isnan(actual) & np.isnan(rounded))
        error = np.where(is_same, 0.0, np.abs(actual.astype(np.float64) - expected))
    return np.where(np.isfinite(error), error, math.inf)


def difference(
    actual: Array, expected: Array, allowed: float | Array, words: str = ""
) -> Difference:
    """Compare an array with its reference; integers and bools must be equal.

    `allowed` is a limit of the error for all elements, or an array with a limit for each element.
    In the text, `words` replace the limit, unless they are empty.
    """
    if actual.shape != expected.shape:
        return Difference(math.inf, 0.0, 1, f"the shape is {actual.shape}, not {expected.shape}")
    if actual.size == 0:
        return Difference(0.0, 0.0)
    error = errors_of(actual, expected)
    limits = np.broadcast_to(allowed if actual.dtype.kind == "f" else 0.0, error.shape)
    place = np.unravel_index(int(np.argmax(error - limits)), error.shape)
    worst, limit = float(error[place]), float(limits[place])
    if worst <= limit:
        return Difference(worst, limit)
    wrong = int((error > limits).sum())
    text = (
        f"element {[int(index) for index in place]} is {_number(actual[place])}, it should be "
        f"{_number(expected[place])} (allowed {words or f'{limit:.3g}'}); {wrong} of "
        f"{actual.size} elements are wrong"
    )
    return Difference(worst, limit, wrong, text)


def _number(value: Any) -> str:
    return f"{value:.8g}" if isinstance(value, np.floating) else str(value)


def tensor_difference(
    actual: torch.Tensor, expected: torch.Tensor, terms: int, eps: float = 0.0
) -> Difference:
    """Compare the elements whose reference is finite.

    The allowed error is the tolerance for sums of `terms` terms, with the larger of `eps` and the
    dtype's epsilon. For integers and bools the error is the number of unequal elements; for a wrong
    shape or dtype it is infinite.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Difference(math.inf, 0.0)
    if not expected.is_floating_point():
        return Difference(float((actual != expected).sum()), 0.0)
    finite = expected.isfinite()
    right = expected[finite].double().numpy()
    unit = max(eps, eps_of(expected.dtype))
    allowed = tolerance(largest_of(right), unit, terms) + UNITS * torch.finfo(expected.dtype).tiny
    return difference(actual[finite].double().numpy(), right, allowed)


def largest_magnitude(tensor: torch.Tensor) -> float:
    """Return the largest magnitude of a tensor; infinite if an element is infinite or NaN."""
    if not tensor.numel():
        return 0.0
    return float(tensor.detach().double().abs().nan_to_num(nan=math.inf).max())


def tolerance(largest: float, eps: float, terms: int = 1, units: float = UNITS) -> float:
    """Return the allowed error of sums of `terms` terms; `largest` is the largest absolute sum."""
    return units * math.sqrt(max(terms, 1)) * eps * largest


def sum_tolerance(terms: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """Return, for each element, how far two sums of the terms in `dtype` may be apart.

    The error of n - 1 additions and one product is below n * eps * sum of magnitudes, to first
    order, in any order of additions. It is infinite where magnitudes overflow.
    """
    with np.errstate(all="ignore"):
        size = np.asarray(reduce(np.add, map(np.abs, terms)), np.float64)
    limits = np.finfo(dtype)
    return np.asarray(2 * len(terms) * (float(limits.eps) * size + float(limits.tiny)))


def case_tolerance(expected: Array, eps: float, terms: int = 1, units: float = UNITS) -> float:
    """Return the allowed error of a result whose inputs have magnitudes of about 1.

    The largest magnitude counts as at least 1, because terms that cancel are larger than their sum.
    """
    return tolerance(max(1.0, largest_of(expected)), eps, terms, units)


def half_digits(*dtypes: str | None) -> float:
    """Return the relative error of a value that has lost half of its digits.

    The value has the coarsest dtype among `dtypes` and float32.
    """
    return math.sqrt(eps_of("float32", *(dtype for dtype in dtypes if dtype is not None)))


def eps_of(*dtypes: torch.dtype | str) -> float:
    """Return the machine epsilon of the coarsest floating dtype; 0 if there is none."""
    kinds = [getattr(torch, dtype) if isinstance(dtype, str) else dtype for dtype in dtypes]
    return max((torch.finfo(kind).eps for kind in kinds if kind.is_floating_point), default=0.0)


def largest_of(values: Array) -> float:
    """Return the largest finite magnitude; 0 if there is none."""
    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
