"""What is made of measured times: the quicker of two, and an update with what it causes."""

from __future__ import annotations

from hetpipe.profile.measure import _quickest
from hetpipe.profile.profiler import _step


def test_of_two_measurements_each_quicker_time_counts() -> None:
    first = {"a": [(1.0, 5.0, 0.3), (2.0, 2.0, 0.0)]}
    second = {"a": [(2.0, 4.0, 0.2), (3.0, 1.0, 0.0)]}
    assert _quickest([first, second]) == {"a": [(1.0, 4.0, 0.2), (2.0, 1.0, 0.0)]}


def test_a_layer_that_cannot_run_stays_impossible() -> None:
    assert _quickest([{"a": ["no kernel"]}, {"a": ["no kernel"]}]) == {"a": ["no kernel"]}


def test_an_update_costs_what_the_passes_behind_it_take_longer() -> None:
    assert _step((1.0, 2.0, 0.0), (1.5, 2.25, 0.5)) == (1.0, 2.0, 1.25)
    assert _step((1.0, 2.0, 0.0), (0.5, 2.0, 0.5)) == (1.0, 2.0, 0.5), "never less than its own"
    assert _step((1.0, 2.0, 0.0), (1.5, 2.0, 0.0)) == (1.0, 2.0, 0.0), "no weights, no update"
