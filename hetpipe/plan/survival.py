"""How often to copy a training's state, if failures come at random.

Failures are independent, and the mean time between two of them is M (`mtbf_s`). A copy holds the
training up for d (`copy_s`), and t (`interval_s`) is the work between two copies. After a failure
the training needs R (`restart_s`) to start from the last copy; a failure during this time begins it
again. Work of T then takes

    M exp(R / M) (exp((t + d) / M) - 1) T / t

on average (J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart
dumps, Future Generation Computer Systems 22, 2006). R multiplies the whole time, so it does not
change the best interval. J. W. Young's interval, sqrt(2 d M), is the first approximation (A first
order approximation to the optimum checkpoint interval, Communications of the ACM 17, 1974).
"""

from __future__ import annotations

import math

from hetpipe.errors import HetpipeError

LARGEST = 700.0
"""The largest power of e that the expected time is computed for; above it the time is infinite."""


def best_updates(step_s: float, copy_s: float, mtbf_s: float) -> int:
    """Return the best number of updates from one copy to the next, at least 1.

    An update takes `step_s`. Raises `HetpipeError` like `daly_interval_s`.
    """
    _positive(step_s=step_s)
    exact = daly_interval_s(copy_s, mtbf_s) / step_s
    counts = max(1, math.floor(exact)), max(1, math.ceil(exact))
    return min(counts, key=lambda count: expected_s(1.0, count * step_s, copy_s, mtbf_s))


def daly_interval_s(copy_s: float, mtbf_s: float) -> float:
    """Return the best work between two copies, in seconds, by Daly's higher-order formula.

    Raises `HetpipeError` unless both times are finite and positive.
    """
    _positive(copy_s=copy_s, mtbf_s=mtbf_s)
    ratio = copy_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_interval_s(copy_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - copy_s


def young_interval_s(copy_s: float, mtbf_s: float) -> float:
    """Return the best work between two copies, in seconds, by Young's formula; for copies that take
    much less time than passes between failures.

    Raises `HetpipeError` unless both times are finite and positive.
    """
    _positive(copy_s=copy_s, mtbf_s=mtbf_s)
    return math.sqrt(2 * copy_s * mtbf_s)


def expected_s(
    work_s: float, interval_s: float, copy_s: float, mtbf_s: float, restart_s: float = 0.0
) -> float:
    """Return the mean seconds that work takes with copies, failures and restarts, by Daly's model.

    Raises `HetpipeError` unless `interval_s` and `mtbf_s` are finite and positive.
    """
    _positive(interval_s=interval_s, mtbf_s=mtbf_s)
    segment = (interval_s + copy_s) / mtbf_s
    if segment + restart_s / mtbf_s > LARGEST:
        return math.inf
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(segment) * work_s / interval_s


def _positive(**times_s: float) -> None:
    for name, time_s in times_s.items():
        if not 0 < time_s < math.inf:
            raise HetpipeError(f"{name} is {time_s}: give a finite time above 0 seconds")
