"""What is made of measured times: medians, and an update with what it causes."""

from __future__ import annotations

from hetpipe.profile.estimate import step_times


def test_an_update_costs_what_the_passes_behind_it_take_longer() -> None:
    assert step_times((1.0, 2.0, 0.0), (1.5, 2.25, 0.5)) == (1.0, 2.0, 1.25)
    assert step_times((1.0, 2.0, 0.0), (0.5, 2.0, 0.5)) == (1.0, 2.0, 0.5), "never less"
    assert step_times((1.0, 2.0, 0.0), (1.5, 2.0, 0.0)) == (1.0, 2.0, 0.0), "no update"
