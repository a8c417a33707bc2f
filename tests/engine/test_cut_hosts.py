"""A training over hosts survives a cut of the network at any moment; see also `break_cuts.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from break_cuts import CUT, started
from broken_cases import CASES
from networks import network


@pytest.mark.parametrize("name", CUT)
def test_a_training_survives_a_cut_at_a_random_moment(name: str, tmp_path: Path) -> None:
    with (
        network(CASES[name].count, tmp_path) as net,
        started(net, "--most", 1, name) as process,
    ):
        words, _ = process.communicate(timeout=300)
    assert process.returncode == 0, words
    assert "1 cuts: " in words
