"""Steps computed in one pass equal the simulator's steps bit for bit."""

from __future__ import annotations

import math
import random

import pytest

from hetpipe.schedule.generators import generate, max_in_flight
from hetpipe.schedule.rule import rule_of
from hetpipe.simulate import simulator
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer
from hetpipe.simulate.walk import order_of, step_s, walk

STRAIGHT = ["naive", "gpipe", "1f1b", "1f1b-sno", "1f1b-so", "zb-h1"]
SEVERAL = ["interleaved", "zb-v"]


def random_times(rng: random.Random, stages: int, pairs: tuple[tuple[int, int], ...]) -> StageTimes:
    def seconds(count: int) -> tuple[float, ...]:
        return tuple(rng.choice([0.0, rng.random(), rng.random() / 10]) for _ in range(count))

    def links() -> tuple[Transfer, ...]:
        both = zip(seconds(stages - 1), seconds(stages - 1), strict=True)
        return tuple(Transfer(*each) for each in both)

    ways = [(a, b) for owner, other in pairs for a, b in ((owner, other), (other, owner))]
    tied = {way: Transfer(*seconds(2)) for way in ways}
    return StageTimes(
        seconds(stages), seconds(stages), seconds(stages), links(), links(), tied,
        chunks=tuple(rng.choice([1.0, 1.0, 4.0, math.inf]) for _ in range(stages)),
        input_s=seconds(stages), weight_s=seconds(stages),
    )  # fmt: skip


@pytest.mark.parametrize("name", STRAIGHT + SEVERAL)
def test_one_pass_equals_the_simulator(name: str) -> None:
    rng = random.Random(name)
    for _ in range(40):
        several = name in SEVERAL
        workers = rng.randint(1, 4)
        stages = 2 * workers if several else workers
        microbatches = workers * rng.randint(1, 4)
        pairs = ((0, stages - 1),) if stages > 1 and rng.random() < 0.5 else ()
        rows = generate(name, stages, microbatches, workers=workers)
        depths = tuple(max_in_flight(rows))
        if name == "1f1b":
            depths = tuple(min(2 * (stages - n) - 1, microbatches) for n in range(stages))
        tied = [(owner, [other]) for owner, other in pairs]
        schedule = generate(
            name, stages, microbatches, in_flight=depths, tied=tied, workers=workers
        )
        times = random_times(rng, stages, pairs)
        order = order_of(rule_of(name), stages, microbatches, depths, workers, pairs)
        assert order is not None
        assert step_s(order, times) == simulate(schedule, times).step_s


@pytest.mark.parametrize("name", ["fbp", "pipedream"])
def test_lanes_and_streams_need_the_simulator(name: str) -> None:
    assert order_of(rule_of(name), 2, 4, (4, 2), 2) is None


@pytest.mark.parametrize("name", [*STRAIGHT, *SEVERAL, "pipedream"])
def test_a_walk_gives_the_spans_of_the_clock(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(name)
    for _ in range(20):
        workers = rng.randint(1, 4)
        stages = 2 * workers if name in SEVERAL else workers
        tied = [(0, [stages - 1])] if stages > 1 else []
        schedule = generate(
            name, stages, workers * rng.randint(1, 4), workers=workers, tied=tied,
            mini_batches=3 if name == "pipedream" else 1,
        )  # fmt: skip
        times = random_times(rng, stages, ((0, stages - 1),))
        assert walk(schedule, times) is not None
        walked = simulate(schedule, times)
        with monkeypatch.context() as patched:
            patched.setattr(simulator, "walk", lambda *arguments: None)
            assert walked == simulate(schedule, times)


def test_schedules_that_need_the_clock_are_not_walked() -> None:
    whole = StageTimes((1.0, 1.0), (2.0, 2.0))
    assert walk(generate("fbp", 2, 4), whole) is None
    assert walk(generate("1f1b", 2, 2, replicas=[2, 1]), whole) is None
    assert walk(generate("pipedream", 2, 1, mini_batches=4, replicas=[2, 1]), whole) is None
