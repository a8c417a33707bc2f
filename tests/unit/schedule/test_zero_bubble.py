"""Zero-bubble schedules: their rows as text, their bubbles, and the micro-batches they keep."""

import pytest

from hetpipe.schedule.action import Op
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.zerobubble import zb_h1, zb_v
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes

SIZES = [(n, m) for n in range(2, 7) for m in (2, 3, 5, 8, 17, 32)]


def equal_stages(stages, forward, inputs, weights):
    return StageTimes(
        (forward,) * stages,
        (inputs + weights,) * stages,
        input_s=(inputs,) * stages,
        weight_s=(weights,) * stages,
    )


def test_h1_delays_weight_gradients_by_the_rank_of_the_stage():
    rows = [" ".join(str(action)[1:] for action in row) for row in zb_h1(3, 4)]
    assert rows == [
        "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
        "F0 F1 I0 F2 I1 W0 F3 I2 W1 I3 W2 W3",
        "F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3",
    ]


def test_transfers_surround_the_first_half_of_a_backward():
    row = generate("zb-h1", 3, 2)[1]
    assert " ".join(str(action)[1:] for action in row) == (
        "RF0 F0 SF0 RF1 F1 SF1 RB0 I0 SB0 RB1 I1 SB1 W0 W1 U"
    )


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("times", [(10, 10, 10), (10, 12, 8), (10, 20, 5)])
def test_bubble_of_h1(n, m, times):
    """The bubble is (N-1)(F+I-W) while W <= min(F, I) and M >= N: a third of 1F1B's if all are
    equal."""
    forward, inputs, weights = times
    costs = equal_stages(n, *times)
    bubble = simulate(generate("zb-h1", n, m), costs).step_s - m * sum(times)
    plain = simulate(generate("1f1b", n, m), costs).step_s - m * sum(times)
    assert plain == (n - 1) * sum(times)
    if m >= n:
        assert bubble == (n - 1) * (forward + inputs - weights)
    else:
        assert bubble < plain


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_h1_keeps_as_much_as_the_first_stage_of_1f1b(n, m):
    assert max_in_flight(generate("zb-h1", n, m)) == [min(n, m)] * n
    assert max_in_flight(generate("1f1b", n, m))[0] == min(n, m)


def test_a_bound_removes_the_delay():
    bounds = [3, 2, 1]
    schedule = generate("zb-h1", 3, 5, in_flight=bounds)
    assert max_in_flight(schedule) == bounds
    assert simulate(schedule, equal_stages(3, 1, 1, 1)).step_s > 5 * 3 + 2


def test_v_puts_the_first_and_the_last_stage_on_the_first_worker():
    rows = [" ".join(map(str, row)) for row in zb_v(4, 4, None, 2)]
    assert rows == [
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 "
        "0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3",
        "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 "
        "1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3",
    ]


@pytest.mark.parametrize("n", range(2, 7))
@pytest.mark.parametrize("more", [0, 1, 7])
def test_v_has_no_bubble_if_all_passes_take_equally_long(n, more):
    """Every worker computes without a pause from its first pass to its last."""
    m = 2 * n + more
    timeline = simulate(generate("zb-v", 2 * n, m, workers=n), equal_stages(2 * n, 10, 10, 10))
    for worker in range(n):
        spans = [
            s for s in timeline.spans
            if s.worker == worker and s.action.op.is_compute and s.action.op is not Op.UPDATE
        ]  # fmt: skip
        assert max(s.end_s for s in spans) - min(s.start_s for s in spans) == 2 * m * 30
    assert timeline.step_s == 2 * m * 30 + (n - 1) * 10


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 3), *SIZES])
def test_v_keeps_as_much_everywhere_as_the_first_worker_of_1f1b(n, m):
    """Passes count as halves of a worker's share; few micro-batches are all kept."""
    schedule = generate("zb-v", 2 * n, m, workers=n)
    for row in schedule:
        kept = most = 0
        for action in row:
            kept += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD_WEIGHT)
            most = max(most, kept)
        assert most <= min(2 * n, 2 * m)
    assert max_in_flight(schedule) == [min(2 * n - stage, m) for stage in range(2 * n)]
