"""Errors of a kernel's outputs, in units in the last place and as shares of the limit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hetpipe.check.difference import difference, eps_of, errors_of, largest_of, tolerance
from hetpipe.sdk.formats.kernelspec import Tolerance
from hetpipe.sdk.kernels import Array


@dataclass(frozen=True)
class OutputError:
    """The largest errors of an output, in units in the last place and as shares of the limit.

    `wrong` counts the elements beyond the limit; `text` describes the worst one.
    """

    ulp: float
    share: float
    wrong: int
    text: str = ""


def output_error(actual: Array, reference: Array, allowed: Tolerance, terms: int) -> OutputError:
    """Compare an output with its float64 reference."""
    if actual.size == 0:
        return OutputError(0.0, 0.0, 0)
    if actual.dtype.kind != "f":
        found = difference(actual, reference.astype(actual.dtype), 0.0)
        error = math.inf if found.wrong else 0.0
        return OutputError(error, error, found.wrong, found.text)
    right = reference.astype(np.float64)
    errors = errors_of(actual, right)
    with np.errstate(all="ignore"):
        rounded = right.astype(actual.dtype)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        ulps = np.where(
            np.isfinite(unit) & (unit > 0), errors / unit, np.where(errors, math.inf, 0)
        )
        words, limits = "", np.zeros_like(right)
        if allowed.error == "ulp":
            words = f"{allowed.units:g} ulp"
            limits = np.where(np.isfinite(unit), allowed.units * unit, 0.0)
        elif allowed.error == "sum":  # values beyond the dtype's range must not widen the limit
            largest = largest_of(np.where(np.isfinite(rounded), right, np.nan))
            limits += tolerance(largest, eps_of(actual.dtype.name), terms)
        shares = np.where(errors == 0, 0.0, errors / limits)
    found = difference(actual, right, limits, words)
    return OutputError(float(ulps.max()), float(shares.max()), found.wrong, found.text)
