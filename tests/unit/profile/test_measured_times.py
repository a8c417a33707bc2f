"""Costs from measured times: an update includes the time that it adds to the passes after it."""

from __future__ import annotations

import math

import pytest

from hetpipe.profile.estimate import added_s, change_s


def test_an_update_includes_the_time_added_to_the_next_passes() -> None:
    assert change_s([1.5, 1.75, 9.0], [1.0, 1.25, 1.0]) == 0.5, "the median of pairs"
    assert change_s([1.5, math.nan], [1.0, 1.0]) == 0.5, "of those that can be believed"
    assert change_s([], []) == 0.0


def test_noise_of_layers_does_not_add_up() -> None:
    assert added_s({0: 0.5, 1: 0.25}, {0: 1, 1: 2}) == {0: 0.5, 1: 0.25}
    noisy = added_s({0: 0.5, 1: -0.4, 2: 0.1}, {0: 1, 1: 1, 2: 1})
    assert sum(noisy.values()) == pytest.approx(0.2)
    assert noisy[1] == 0.0
    assert noisy[0] == pytest.approx(5 * noisy[2])
    assert added_s({0: 0.5, 1: -0.4}, {0: 1, 1: 3}) == {0: 0.0, 1: 0.0}, "by the number of layers"
    assert added_s({}, {}) == {}
