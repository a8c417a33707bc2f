"""The benchmark's pace: long steps get few repetitions, so that a run ends in reasonable time."""

from __future__ import annotations

from hetpipe.bench.rows import Pace


def test_short_steps_get_more_repetitions_than_long_ones() -> None:
    assert Pace.of(0.01) == Pace(warm_up=3, timed=4, checked=20)
    assert Pace.of(0.25) == Pace(warm_up=2, timed=3, checked=6)
    assert Pace.of(60.0) == Pace(warm_up=1, timed=1, checked=4)
    assert Pace.of(60.0, timed=7).timed == 7, "as asked for"
