"""The costs of a simulated step: bubble, memory over time, bytes by link; by hand and by bounds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.simulate.outcome import Memory, Outcome, outcome
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes, Transfer


def timeline(*spans: tuple[int, str, float, float]) -> Timeline:
    each = tuple(Span(worker, Action.parse(text), lo, hi) for worker, text, lo, hi in spans)
    return Timeline(("a", "b"), each, "measured")


def outcome_of(schedule: Schedule, memory: Sequence[Memory], transfer_s: float = 0.0) -> Outcome:
    n = len(memory)
    hops = (Transfer(0.0, transfer_s),) * (n - 1)
    times = StageTimes((1.0,) * n, (2.0,) * n, (0.5,) * n, hops, hops)
    return outcome(simulate(schedule, times), memory)


def test_a_step_by_hand() -> None:
    """Two micro-batches; b waits for the first and has a backward in halves."""
    step = timeline(
        (0, "0F0", 1.0, 2.0), (0, "0SF0", 2.0, 3.0), (0, "0F1", 2.0, 3.0), (0, "0SF1", 3.0, 4.0),
        (1, "1RF0", 1.0, 3.0), (1, "1F0", 3.0, 4.0), (1, "1I0", 4.0, 5.0), (1, "1SB0", 5.0, 6.0),
        (0, "0RB0", 3.0, 6.0), (0, "0B0", 6.0, 8.0), (1, "1W0", 7.0, 11.0),
    )  # fmt: skip
    memory = Memory(100, 10, cut_nbytes=3), Memory(200, 20, 5, cut_nbytes=7)
    costs = outcome(step, memory)
    assert (costs.workers, costs.step_s) == (("a", "b"), 10.0)
    assert costs.bubble == pytest.approx((0.6, 0.4))
    a, b = costs.memory
    assert (a.seconds.tolist(), a.nbytes.tolist()) == ([1, 2, 8], [110, 120, 110])
    assert (b.seconds.tolist(), b.nbytes.tolist()) == ([1, 3, 5, 11], [200, 220, 205, 200])
    assert costs.peak_nbytes == (120, 220)
    assert costs.link_nbytes == {(0, 1): 3, (1, 0): 3}  # 0SF1 has not been received


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 3), (3, 8), (4, 2), (5, 16)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "1f1b-so", "naive", "pipedream"])
def test_peaks_are_the_micro_batches_in_flight(name: str, n: int, m: int) -> None:
    schedule = generate(name, n, m)
    memory = [Memory(1000 * stage, 10 + stage) for stage in range(n)]
    depths = {
        "naive": [1] * n,
        "gpipe": [m] * n,
        "1f1b-so": [min(2 * (n - stage), m) for stage in range(n)],
    }.get(name, [min(n - stage, m) for stage in range(n)])
    assert max_in_flight(schedule) == depths
    for transfer_s in (0.0, 0.7, 5.0):
        peaks = outcome_of(schedule, memory, transfer_s).peak_nbytes
        assert peaks == tuple(
            own.resident_nbytes + depth * own.saved_nbytes
            for own, depth in zip(memory, depths, strict=True)
        )


def replayed_peak(row: Sequence[Action], memory: Sequence[Memory]) -> int:
    """Return a worker's peak from the order of its one row, which alone decides it."""
    halved = {action.stage for action in row if action.op is Op.BACKWARD_WEIGHT}
    live: dict[tuple[int, int], int] = {}
    peak, resident = 0, sum(memory[n].resident_nbytes for n in {a.stage for a in row})
    for action in row:
        key, own = (action.stage, action.number), memory[action.stage]
        if action.op is Op.FORWARD:
            live[key] = own.saved_nbytes
        elif action.op is Op.BACKWARD_INPUT:
            live[key] = own.deferred_nbytes
        elif action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            assert (action.op is Op.BACKWARD_WEIGHT) == (action.stage in halved)
            del live[key]
        peak = max(peak, resident + sum(live.values()))
    assert not live
    return peak


@pytest.mark.parametrize("deferred_nbytes", [0, 3, 10])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "interleaved", "1f1b", "data-parallel"])
def test_peaks_of_stages_together_and_of_halves(name: str, deferred_nbytes: int) -> None:
    for workers in (1, 2, 3):
        stages = 2 * workers if name in ("zb-v", "interleaved") else workers
        workers = 1 if name == "data-parallel" else workers
        schedule = generate(name, stages, 2 * workers, workers=workers)
        memory = [Memory(100, 10 + n, deferred_nbytes) for n in range(stages)]
        costs = outcome_of(schedule, memory, 0.3)
        assert costs.peak_nbytes == tuple(replayed_peak(row, memory) for row in schedule)
        for use in costs.memory:
            assert all(earlier < later for earlier, later in pairwise(use.seconds.tolist()))
            assert use.nbytes[-1] == 100 * stages / workers


@pytest.mark.parametrize("n", [1, 2, 4])
def test_zero_bubble_with_all_deferred_keeps_the_depth(n: int) -> None:
    schedule = generate("zb-h1", n, 8)
    peaks = outcome_of(schedule, [Memory(0, 10, 10)] * n).peak_nbytes
    assert peaks == tuple(10 * count for count in max_in_flight(schedule))


@pytest.mark.parametrize(("n", "m"), [(1, 4), (2, 8), (4, 16)])
def test_lanes_count_as_one_worker(n: int, m: int) -> None:
    """The lanes compute together, but each moment counts once as busy, and the stage is resident
    once."""
    schedule = generate("fbp", n, m)
    costs = outcome_of(schedule, [Memory(100, 10)] * n)
    assert costs.workers == tuple(f"worker {stage}" for stage in range(n))
    update_s, equal_s = 0.5, 3 * (m + n - 1)
    assert costs.step_s == pytest.approx(equal_s + update_s)
    assert costs.bubble == pytest.approx([1 - (3 * m + update_s) / costs.step_s] * n)
    bounds = max_in_flight(schedule)
    for peak, bound in zip(costs.peak_nbytes, bounds, strict=True):
        assert 100 + 10 <= peak <= 100 + 10 * bound


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_the_bubble_is_the_idle_share(name: str) -> None:
    schedule = generate(name, 4, 8)
    times = StageTimes((1.0, 2.0, 1.5, 0.5), (2.0,) * 4)
    step = simulate(schedule, times, workers=["a", "b", "c", "d"])
    costs = outcome(step, [Memory()] * 4)
    assert costs.workers == ("a", "b", "c", "d")
    assert costs.bubble == pytest.approx([1 - share for share in step.busy_share()])


def test_bytes_by_link() -> None:
    """Every micro-batch crosses each cut once in either direction.

    Stages on the same worker have no link; replicas that take turns have separate links.
    """
    memory = [Memory(cut_nbytes=10**stage) for stage in range(4)]
    ways = {(0, 1): 8, (1, 0): 8, (1, 2): 80, (2, 1): 80, (2, 3): 800, (3, 2): 800}
    assert outcome_of(generate("1f1b", 4, 8), memory).link_nbytes == ways
    assert outcome_of(generate("fbp", 4, 8), memory).link_nbytes == ways
    chunks = outcome_of(generate("zb-v", 4, 8, workers=2), memory).link_nbytes
    assert chunks == {(0, 1): 8 + 800, (1, 0): 8 + 800}
    turns = generate("pipedream", 2, 1, mini_batches=5, replicas=(2, 1))
    shares = {(0, 2): 3, (2, 0): 3, (1, 2): 2, (2, 1): 2}
    assert outcome_of(turns, memory[:2]).link_nbytes == shares


def test_memory_must_fit_the_stages() -> None:
    step = simulate(generate("1f1b", 2, 2), StageTimes((1.0, 1.0), (1.0, 1.0)))
    with pytest.raises(ScheduleError, match="timeline has 2 stages, but there is memory for 3"):
        outcome(step, [Memory()] * 3)


def test_a_timeline_without_spans() -> None:
    costs = outcome(Timeline(("a",), (), "measured"), [])
    assert (costs.step_s, costs.bubble, costs.peak_nbytes) == (0.0, (0.0,), (0,))
