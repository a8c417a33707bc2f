"""Interleaved 1F1B: its rows as text, and its bubble."""

import pytest

from hetpipe.schedule.action import Op
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.interleaved import interleaved
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes

SIZES = [(n, rounds * n, v) for n in range(2, 7) for rounds in (1, 2, 5) for v in (1, 2, 3)]


def test_micro_batches_pass_the_chunks_in_rounds():
    rows = [" ".join(map(str, row)) for row in interleaved(4, 4, None, 2)]
    assert rows == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize(("n", "m", "v"), SIZES)
@pytest.mark.parametrize("times", [(10, 10), (10, 20), (20, 10)])
def test_the_bubble_shrinks_with_the_chunks(n, m, v, times):
    forward, backward = times
    costs = StageTimes((forward,) * n * v, (backward,) * n * v)
    timeline = simulate(generate("interleaved", n * v, m, workers=n), costs)
    assert timeline.step_s == (v * m + n - 1) * (forward + backward)
    bubble = (n - 1) / (v * m + n - 1)
    assert timeline.busy_share() == pytest.approx([1 - bubble] * n)


@pytest.mark.parametrize(("n", "m", "v"), SIZES)
def test_the_micro_batches_of_a_worker_are_bounded(n, m, v):
    schedule = generate("interleaved", n * v, m, workers=n)
    for worker, row in enumerate(schedule):
        kept = most = 0
        for action in row:
            kept += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD)
            most = max(most, kept)
        assert most == min(2 * (n - worker - 1) + (v - 1) * n + 1, v * m)
    assert max(max_in_flight(schedule)) <= min(2 * n, m)


def test_one_worker_and_one_micro_batch():
    rows = generate("interleaved", 2, 1, workers=1)
    assert " ".join(map(str, rows[0])) == "0F0 0SF0 1RF0 1F0 1B0 1SB0 0RB0 0B0 0U 1U"
