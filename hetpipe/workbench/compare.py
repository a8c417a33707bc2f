"""An output against its reference: within its error class, and how many units off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetpipe.sdk.kernels import Array
from hetpipe.sdk.kernelspec import Tolerance

SLACK = 16.0
"""Of the class `sum`: 16 * sqrt(terms) * eps * the largest magnitude."""


@dataclass(frozen=True)
class Difference:
    """The largest error of an output, in units in the last place of its own elements."""

    ulp: float
    wrong: int
    """Elements beyond the tolerance."""
    text: str = ""
    """The first of them, with both numbers."""
    share: float = 0.0
    """The largest error as a share of the allowed one."""


def difference(actual: Array, reference: Array, tolerance: Tolerance, terms: int) -> Difference:
    """Compare an output with a reference in float64; infinities and NaN must be the same ones."""
    if actual.size == 0:
        return Difference(0.0, 0)
    if actual.dtype.kind != "f":
        off = actual != reference.astype(actual.dtype)
        text = _first(actual, reference, off, "exact")
        worst = math.inf if off.any() else 0.0
        return Difference(worst, int(off.sum()), text, worst)
    wide, right = actual.astype(np.float64), reference.astype(np.float64)
    with np.errstate(all="ignore"):
        rounded = right.astype(actual.dtype)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        error = np.abs(wide - right)
        same = (wide == rounded) | (np.isnan(wide) & np.isnan(right))
        error[same] = 0.0
        error[~np.isfinite(error)] = math.inf
        units = np.where(np.isfinite(unit) & (unit > 0), error / unit, np.where(error, math.inf, 0))
        kept = np.where(np.isfinite(rounded), right, np.nan)  # beyond the dtype's range is inf
        limits = _limit(kept, tolerance, terms, actual.dtype, unit)
        off = error > limits
        shares = np.where(error == 0, 0.0, error / limits)
    allowed = "exact" if tolerance.error == "exact" else tolerance.error
    if allowed == "ulp":
        allowed = f"{tolerance.units:g} ulp"
    elif allowed == "sum":
        allowed = f"an error of {float(np.max(limits)):.3g}"
    text = _first(actual, reference, off, allowed)
    return Difference(float(units.max()), int(off.sum()), text, float(shares.max()))


def _limit(
    right: Array, tolerance: Tolerance, terms: int, dtype: np.dtype[np.floating], unit: Array
) -> Array:
    if tolerance.error == "exact":
        return np.zeros_like(right)
    if tolerance.error == "ulp":
        return np.asarray(np.where(np.isfinite(unit), tolerance.units * unit, 0.0))
    finite = np.abs(right[np.isfinite(right)])
    largest = float(finite.max()) if finite.size else 0.0
    eps = float(np.finfo(dtype).eps)
    return np.full_like(right, SLACK * math.sqrt(max(terms, 1)) * eps * largest)


def _first(actual: Array, reference: Array, off: Array, allowed: str) -> str:
    if not off.any():
        return ""
    at = tuple(int(i) for i in np.unravel_index(int(np.argmax(off)), off.shape))
    return (
        f"element {list(at)} is {actual[at]:.8g}, it should be {reference[at]:.8g} ({allowed} "
        f"allowed); {int(off.sum())} of {off.size} elements are wrong"
    )
