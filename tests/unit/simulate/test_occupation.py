"""The shares of a step: by hand, and for simulated steps."""

from __future__ import annotations

import pytest

from hetpipe.schedule.action import Action
from hetpipe.schedule.generators import generate
from hetpipe.simulate.outcome import Occupation, occupation
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes, Transfer


def timeline(*spans: tuple[int, str, float, float], overhead_s: float = 0.0) -> Timeline:
    each = tuple(Span(worker, Action.parse(text), lo, hi) for worker, text, lo, hi in spans)
    return Timeline(("a", "b"), each, "measured", overhead_s)


def test_every_cause_by_hand() -> None:
    """b waits 2 s for a's pass and 1 s for the message, and begins 0.5 s late; a waits at the
    end."""
    found = occupation(
        timeline(
            (0, "0F0", 0.0, 2.0), (0, "0SF0", 2.0, 2.5),
            (1, "1RF0", 0.0, 3.0), (1, "1F0", 3.5, 6.0),
            overhead_s=2.0,
        )
    )  # fmt: skip
    whole_s = 2 * 8.0
    assert found.computing == pytest.approx(4.5 / whole_s)
    assert found.transfer == pytest.approx(1.0 / whole_s)
    assert found.waiting == pytest.approx((2.0 + 4.0) / whole_s)
    assert found.engine == pytest.approx((0.5 + 2 * 2.0) / whole_s)
    assert str(found) == "computing 28.1%, transfer 6.2%, engine 28.1%, waiting 37.5%"


def test_a_message_that_came_early_costs_nothing() -> None:
    found = occupation(
        timeline(
            (0, "0F0", 0.0, 1.0), (0, "0SF0", 1.0, 1.5), (0, "0F1", 1.0, 4.0),
            (1, "1F9", 0.0, 2.0), (1, "1RF0", 1.0, 1.5), (1, "1F0", 2.0, 4.0),
        )
    )  # fmt: skip
    assert found == Occupation(1.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_a_simulated_step_has_no_engine(schedule: str) -> None:
    """The bubble is waiting, with slow links also transfers; the shares add up to 1."""
    free, slow = Transfer(0.0, 0.0), Transfer(0.1, 0.2)
    for link in (free, slow):
        times = StageTimes((1.0, 1.0), (2.0, 2.0), (0.0, 0.0), (link,), (link,))
        found = occupation(simulate(generate(schedule, 2, 4), times))
        assert found.engine == pytest.approx(0.0, abs=1e-9)
        assert found.computing + found.transfer + found.waiting == pytest.approx(1.0)
        assert (found.transfer > 0) == (link is slow)


def test_an_empty_timeline_is_all_engine() -> None:
    assert occupation(timeline()) == Occupation(0.0, 0.0, 1.0, 0.0)
