"""The interval between copies, compared with a simulated renewal process and Daly's figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hetpipe.errors import HetpipeError
from hetpipe.plan.survival import best_updates, daly_interval_s, expected_s, young_interval_s

MINUTE_S, HOUR_S = 60.0, 3600.0


def renewal_s(interval_s, copy_s, mtbf_s, restart_s, segments=100_000):
    """Return the mean seconds of a second's work: each segment is tried until no failure comes.

    Failures come at exponential distances. After one the restart and the segment begin again. All
    calls draw the same numbers, so their differences have little noise.
    """
    chance = np.random.default_rng(1)
    lasted_s = np.zeros(segments)
    open_, need_s = np.arange(segments), interval_s + copy_s
    while open_.size:
        failure_s = chance.exponential(mtbf_s, segments)[open_]
        lasted_s[open_] += np.minimum(failure_s, need_s)
        open_ = open_[failure_s < need_s]
        need_s = restart_s + interval_s + copy_s
    return lasted_s.mean() / interval_s


@pytest.mark.parametrize("restart_s", [0.0, 5.0, 40.0])
@pytest.mark.parametrize("interval_s", [3.0, 20.0, 150.0])
def test_the_expected_time_is_the_renewal_process(interval_s: float, restart_s: float) -> None:
    simulated = renewal_s(interval_s, 2.0, 100.0, restart_s)
    assert expected_s(1.0, interval_s, 2.0, 100.0, restart_s) == pytest.approx(simulated, rel=0.02)


@pytest.mark.parametrize("restart_s", [0.0, 40.0])
@pytest.mark.parametrize("copy_s", [1.0, 10.0])
def test_no_interval_of_the_renewal_process_beats_daly(copy_s: float, restart_s: float) -> None:
    best_s = daly_interval_s(copy_s, 100.0)
    around = {factor: best_s * factor for factor in np.geomspace(0.25, 4.0, 17)}
    times = {f: renewal_s(each, copy_s, 100.0, restart_s) for f, each in around.items()}
    assert 0.7 < min(times, key=times.get) < 1.5  # the minimum is flat
    assert renewal_s(best_s, copy_s, 100.0, restart_s) <= 1.002 * min(times.values())


@pytest.mark.parametrize("copy_s", [0.001, 0.1, 1.0, 10.0, 50.0])
def test_daly_is_the_minimum_of_the_expected_time(copy_s: float) -> None:
    grid = np.geomspace(0.01, 1000.0, 20_001)
    least_s = min(expected_s(1.0, each, copy_s, 100.0) for each in grid)
    at_daly_s = expected_s(1.0, daly_interval_s(copy_s, 100.0), copy_s, 100.0)
    assert at_daly_s <= 1.0002 * least_s
    assert expected_s(1.0, young_interval_s(copy_s, 100.0), copy_s, 100.0) >= 0.999999 * at_daly_s


@pytest.mark.parametrize(
    ("mtbf_s", "minutes"), [(24 * HOUR_S, 117), (6 * HOUR_S, 57), (15 * MINUTE_S, 9.1)]
)
def test_intervals_are_those_of_dalys_figures(mtbf_s: float, minutes: float) -> None:
    """Compare with figures 3 to 5 of the paper, where a copy takes 5 minutes."""
    interval_s = daly_interval_s(5 * MINUTE_S, mtbf_s)
    assert float(f"{interval_s / MINUTE_S:.{0 if minutes > 10 else 1}f}") == minutes


def test_young_is_the_limit_for_rare_failures() -> None:
    assert young_interval_s(2.0, 100.0) == 20.0
    assert daly_interval_s(1.0, 1e12) == pytest.approx(young_interval_s(1.0, 1e12), rel=1e-5)


def test_copies_longer_than_failures_allow_have_the_interval_of_failures() -> None:
    assert daly_interval_s(200.0, 100.0) == 100.0
    assert daly_interval_s(500.0, 100.0) == 100.0


@pytest.mark.parametrize("step_s", [0.1, 1.0, 7.0, 30.0])
@pytest.mark.parametrize("mtbf_s", [1.0, 60.0, 3600.0])
def test_updates_between_copies_are_the_best_whole_number(step_s: float, mtbf_s: float) -> None:
    times = [expected_s(1.0, n * step_s, 0.5, mtbf_s) for n in range(1, 2000)]
    count = best_updates(step_s, 0.5, mtbf_s)
    assert times[count - 1] <= 1.0002 * min(times)


def test_an_update_is_the_least_interval() -> None:
    assert best_updates(1e6, 0.5, 1.0) == 1  # no update is likely to end, and no fewer is possible
    assert expected_s(1.0, 1e6, 0.5, 1.0) == math.inf


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan])
def test_times_that_make_no_sense_are_refused(wrong: float) -> None:
    with pytest.raises(HetpipeError, match=f"mtbf_s is {wrong}: give a finite time"):
        daly_interval_s(1.0, wrong)
    with pytest.raises(HetpipeError, match="copy_s is"):
        young_interval_s(wrong, 1.0)
    with pytest.raises(HetpipeError, match="step_s is"):
        best_updates(wrong, 1.0, 1.0)
