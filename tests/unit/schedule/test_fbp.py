"""FBP: forwards and backwards together on two lanes, with its text, checks and times."""

import math
import random
from fractions import Fraction

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.straight import fbp
from hetpipe.schedule.text import format_grid, parse_schedule
from hetpipe.schedule.validate import validate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer

ALONE = """
worker 0 lane 0: 0F0 0SK0 0F1 0SK1 0RV0 0F2 0SK2
worker 0 lane 1: 0RK0 0B0 0SV0 0RK1 0B1 0RK2 0B2 0U
"""


def test_forwards_and_backwards_have_separate_rows():
    rows = [" ".join(str(action)[1:] for action in row) for row in fbp(2, 3, [2, 1])]
    assert rows == [
        "F0 SK0 F1 SK1 RV0 F2 SK2",
        "RK0 B0 SV0 RK1 B1 RK2 B2",
        "F0 SK0 RV0 F1 SK1 RV1 F2 SK2",
        "RK0 B0 SV0 RK1 B1 SV1 RK2 B2",
    ]


def test_transfers_and_the_update_are_in_order():
    assert format_grid(generate("fbp", 2, 1)) == (
        "worker 0 lane 0: 0F0 0SF0 0SK0\n"
        "worker 0 lane 1: 0RK0 0RB0 0B0 0U\n"
        "worker 1 lane 0: 1RF0 1F0 1SK0\n"
        "worker 1 lane 1: 1RK0 1B0 1SB0 1U"
    )
    assert parse_schedule(ALONE) == generate("fbp", 1, 3)


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("m", [1, 2, 3, 8, 17, 32])
@pytest.mark.parametrize("times", [(10, 10), (10, 20), (20, 10)])
def test_fbp_as_in_bapipe(n, m, times):
    """By table 1 FBP takes as long as 1F1B and keeps twice as many micro-batches."""
    forward, backward = times
    schedule = generate("fbp", n, m)
    timeline = simulate(schedule, StageTimes((forward,) * n, (backward,) * n))
    assert timeline.step_s == (m + n - 1) * (forward + backward)
    assert max_in_flight(schedule) == [min(2 * (n - stage), m) for stage in range(n)]


def exposed_s(name, m, transfer_s):
    """Return the time that transfers add to a step of 4 streaming stages with F = B = 10."""
    hops = (Transfer(0, transfer_s),) * 3
    times = StageTimes((10,) * 4, (10,) * 4, (), hops, hops, chunks=(math.inf,) * 4)
    return simulate(generate(name, 4, m), times).step_s - (m + 3) * 20


def test_fbp_needs_less_bandwidth_than_1f1b():
    """Both schedules hide transfers that take no longer than a forward. FBP hides longer ones too,
    except while the pipeline fills (table 1)."""
    for name in ("fbp", "1f1b-as"):
        assert exposed_s(name, 32, 10) == 0
    assert exposed_s("fbp", 64, 15) == exposed_s("fbp", 32, 15) > 0
    assert exposed_s("1f1b-as", 64, 15) > 1.5 * exposed_s("1f1b-as", 32, 15)


def test_lanes_share_their_worker_evenly():
    """F1 and B0 begin together; when F1 ends, B0 needs 1 s more and runs twice as fast.

    The last stage computes without a pause.
    """
    timeline = simulate(generate("fbp", 1, 2), StageTimes((2,), (3,)))
    spans = {str(s.action): (s.start_s, s.end_s) for s in timeline.spans}
    assert timeline.workers == ("worker 0 lane 0", "worker 0 lane 1")
    assert [spans[name] for name in ("0F0", "0F1", "0B0", "0B1")] == [
        (0, 2), (2, 6), (2, 7), (7, 10),
    ]  # fmt: skip
    named = simulate(generate("fbp", 1, 2), StageTimes((2,), (3,)), workers=["board"])
    assert named.workers == ("board lane 0", "board lane 1")


def fluid_model_s(stages, microbatches, bounds, forward_s, backward_s):
    """Return the end of the last backward, by a simple model that goes from event to event and
    keeps time in exact fractions."""
    done = {(kind, n): 0 for kind in "FB" for n in range(stages)}
    left = {}
    now = Fraction(0)
    while done["B", 0] < microbatches or left:
        for kind, n in done:
            number = done[kind, n]
            if kind == "F":
                ready = (n == 0 or done["F", n - 1] > number) and (
                    number - done["B", n] < bounds[n]
                )
            else:
                ready = done["F", n] > number and (n == stages - 1 or done["B", n + 1] > number)
            if ready and number < microbatches and (kind, n) not in left:
                left[kind, n] = Fraction((forward_s if kind == "F" else backward_s)[n])
        speed = {n: Fraction(1, sum(other == n for _, other in left)) for _, n in left}
        step = min(rest / speed[n] for (_, n), rest in left.items())
        now += step
        left = {lane: rest - step * speed[lane[1]] for lane, rest in left.items()}
        for lane in [lane for lane, rest in left.items() if rest == 0]:
            del left[lane]
            done[lane] += 1
    return now


@pytest.mark.parametrize("seed", range(40))
def test_unequal_stages_agree_with_a_fluid_model(seed):
    rng = random.Random(seed)
    n, m = rng.randint(1, 5), rng.randint(1, 9)
    forward_s = tuple(rng.randint(1, 9) for _ in range(n))
    backward_s = tuple(rng.randint(1, 9) for _ in range(n))
    bounds = [rng.randint(1, 2 * (n - stage)) for stage in range(n)]
    timeline = simulate(generate("fbp", n, m, in_flight=bounds), StageTimes(forward_s, backward_s))
    expected = fluid_model_s(n, m, bounds, forward_s, backward_s)
    assert timeline.step_s == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("0RK0 0B0", "0B0 0RK0", "0B0 comes before 0RK0, which it needs"),
        ("0F0 0SK0", "0SK0 0F0", "0SK0 comes before 0F0, which it needs"),
        ("0RV0 ", "", "0SV0 is never received"),
        ("0SV0 ", "", "0RV0 receives from stage 0, which sends nothing more"),
        ("0RK2 0B2 0U", "0RK2 0U 0B2", "the update of stage 0 must come last"),
        (
            "0SV0 0RK1 0B1 0RK2",
            "0RK1 0B1 0RK2 0SV0",
            "deadlock: worker 0 lane 0 waits in 0RV0 for ",
        ),
    ],
)
def test_faults_between_lanes_are_found(before, after, message):
    assert before in ALONE
    changed = parse_schedule(ALONE.replace(before, after))
    with pytest.raises(ScheduleError, match=message):
        validate(changed, 3)


def test_a_bound_is_checked_between_lanes():
    with pytest.raises(ScheduleError, match="stage 0 has 2 forwards in flight, its bound is 1"):
        validate(parse_schedule(ALONE), 3, in_flight=[1])
