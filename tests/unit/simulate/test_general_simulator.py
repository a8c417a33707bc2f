"""Cases for the clock: shared media, half duplex, rings; by hand, and compared with fractions."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op, Schedule
from hetpipe.schedule.generators import generate
from hetpipe.schedule.lanes import row_workers
from hetpipe.schedule.text import parse_schedule
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import FREE, StageTimes, Transfer, ring_s

BUS = ("bus",)
PAIRS = "0F0 0SF0\n1RF0 1F0\n2F0 2SF0\n3RF0 3F0\n4F0 4SF0\n5RF0 5F0\n6F0 6SF0\n7RF0 7F0"
"""Four messages of independent pairs of workers."""


def message_times(text: str, times: StageTimes) -> dict[str, tuple[float, float]]:
    """Return the start and the arrival of each message, by action."""
    spans = simulate(parse_schedule(text), times).spans
    return {
        str(s.action): (s.start_s, s.end_s)
        for s in spans
        if s.action.op.is_send or s.action.op is Op.ALL_REDUCE
    }


def pairs(
    forward_s: tuple[float, ...], links: dict[int, Transfer], chunks: float = 1
) -> dict[str, tuple[float, float]]:
    """Return the times of messages from stages 0, 2, ...: `forward_s` in order, `links` by
    stage."""
    stages = 2 * len(forward_s)
    each_s = tuple(s for forward in forward_s for s in (forward, 0.0))
    hops = tuple(links.get(n, FREE) for n in range(stages - 1))
    text = "\n".join(PAIRS.splitlines()[:stages])
    return message_times(text, StageTimes(each_s, each_s, (), hops, chunks=(chunks,) * stages))


def test_two_simultaneous_messages_take_twice_as_long() -> None:
    bus = Transfer(0.0, 2.0, BUS)
    assert pairs((1.0, 1.0), {0: bus, 2: bus}) == {"0SF0": (1, 5), "2SF0": (1, 5)}
    alone = Transfer(0.0, 2.0, ("another",))
    assert pairs((1.0, 1.0), {0: bus, 2: alone}) == {"0SF0": (1, 3), "2SF0": (1, 3)}


def test_a_later_message_slows_the_rest_of_the_first() -> None:
    """The first message is alone for 1 s; its remaining 1 s takes 2 s; then the other is alone."""
    bus = Transfer(0.0, 2.0, BUS)
    assert pairs((1.0, 2.0), {0: bus, 2: bus}) == {"0SF0": (1, 4), "2SF0": (2, 5)}


def test_latency_is_not_on_the_medium() -> None:
    """The second message has the bus alone while only the latency of the first remains."""
    late, bus = Transfer(9.0, 1.0, BUS), Transfer(0.0, 2.0, BUS)
    assert pairs((1.0, 2.0), {0: late, 2: bus}) == {"0SF0": (1, 11), "2SF0": (2, 4)}


def test_the_fullest_medium_sets_the_speed() -> None:
    """Two messages on x, three on y. The first, on both, gets a third, though x would give it a
    half."""
    times = {
        0: Transfer(0.0, 1.0, ("x", "y")),
        2: Transfer(0.0, 1.0, ("x",)),
        4: Transfer(0.0, 2.0, ("y",)),
        6: Transfer(0.0, 4.0, ("y",)),
    }
    ends_s = {name: end_s for name, (_, end_s) in pairs((0.0,) * 4, times).items()}
    assert ends_s == pytest.approx({"0SF0": 3, "2SF0": 2, "4SF0": 5, "6SF0": 7}, rel=1e-12)


def test_an_edge_carries_one_message_at_a_time() -> None:
    """Two messages of one edge never share its bus at the same time."""
    text = "0F0 0SF0 0SF1\n1RF0 1F0 1RF1"
    bus = (Transfer(0.5, 2.0, BUS),)
    assert message_times(text, StageTimes((1.0, 1.0), (1.0, 1.0), (), bus)) == {
        "0SF0": (1, 3.5), "0SF1": (3, 5.5),
    }  # fmt: skip


@pytest.mark.parametrize(("media", "end_s"), [(((), ()), 3), ((BUS, BUS), 5), ((BUS, ()), 3)])
def test_half_duplex_is_one_medium_for_both_directions(
    media: tuple[tuple[str, ...], tuple[str, ...]], end_s: float
) -> None:
    there, back = (Transfer(0.0, 2.0, each) for each in media)
    times = StageTimes((1.0, 1.0), (1.0, 1.0), (), (there,), (back,))
    both = message_times("0F0 0SF0 0RB1\n1B1 1SB1 1RF0", times)
    assert both == {"0SF0": (1, end_s), "1SB1": (1, end_s)}


def test_streams_share_from_their_first_chunk_and_end_after_their_pass() -> None:
    slow, quick = Transfer(0.0, 3.0, BUS), Transfer(0.0, 1.0, BUS)
    assert pairs((4.0,), {0: quick}, math.inf) == {"0SF0": (0, 4)}
    assert pairs((4.0,), {0: quick}, 4) == {"0SF0": (1, 4.25)}
    # Each has made 2 of 3 s when its pass ends, and the last 1 s takes 2 s.
    assert pairs((4.0, 4.0), {0: slow, 2: slow}, math.inf) == {"0SF0": (0, 6), "2SF0": (0, 6)}
    # From 1 to 4 s each makes 1.5 of 4 s.
    four = Transfer(0.0, 4.0, BUS)
    assert pairs((4.0, 4.0), {0: four, 2: four}, 4) == {"0SF0": (1, 9), "2SF0": (1, 9)}


def test_a_ring_by_hand() -> None:
    """Four replicas: 6 rounds of 0.5 s latency and 8 / 4 bytes at 2 bytes/s."""
    assert ring_s(4, 8, 0.5, 2.0) == 6 * (0.5 + 1.0)
    assert ring_s(2, 100, 0.0, 50.0) == 2.0
    assert ring_s(1, 100, 0.5, 50.0) == 0.0
    schedule = generate("1f1b", 1, 1, replicas=(4,))
    alone = StageTimes((1.0,), (2.0,), sums=(Transfer(3.0, 6.0),))
    shared = replace(alone, sums=(Transfer(3.0, 6.0, BUS),))
    assert simulate(schedule, alone).step_s == simulate(schedule, shared).step_s == 3 + 9


def test_a_sum_shares_its_media_with_messages() -> None:
    """The message takes 4 s instead of 2; then 4 s of the sum and its latency remain."""
    text = "0B0 0A 0U\n1B0\n2F0 2SF0\n3RF0 3F0"
    times = StageTimes(
        (1.0,) * 4, (1.0,) * 4, (0.5,) * 4, (FREE, FREE, Transfer(0.0, 2.0, BUS)),
        sums=(Transfer(3.0, 6.0, BUS), FREE, FREE, FREE),
    )  # fmt: skip
    assert message_times(text, times) == {"2SF0": (1, 5), "0A": (1, 12)}
    assert simulate(parse_schedule(text), times).step_s == 12.5


def test_sums_of_one_worker_run_one_after_the_other() -> None:
    """Two stages of a worker sum over a bus; each update waits for both sums."""
    sums = Transfer(3.0, 2.0, BUS), Transfer(1.0, 2.0, BUS)
    times = StageTimes((1.0,) * 2, (1.0,) * 2, sums=sums)
    assert message_times("0F0 1F0 1B0 1A 0B0 0A 0U 1U", times) == {"1A": (3, 6), "0A": (6, 11)}


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        ((0, 8, 0.0, 1.0), "a ring of 0 replicas at 1.0 bytes/s: give 1 replica or more"),
        ((2, 8, 0.0, 0.0), "a ring of 2 replicas at 0.0 bytes/s: .* more than 0 bytes/s"),
    ],
)
def test_invalid_rings_are_refused(ring: tuple[int, int, float, float], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        ring_s(*ring)


def test_sums_are_checked_with_their_stages() -> None:
    with pytest.raises(ScheduleError, match="sums has 1 entries, 2 stages need 2"):
        StageTimes((1.0, 1.0), (1.0, 1.0), sums=(FREE,))
    with pytest.raises(ScheduleError, match="sums and all_reduce_s price the same sums"):
        StageTimes((1.0,), (1.0,), all_reduce_s=(1.0,), sums=(FREE,))


def seconds(rng: random.Random, count: int) -> tuple[float, ...]:
    return tuple(rng.choice([0.0, 1.0, rng.random(), 3 * rng.random()]) for _ in range(count))


def random_schedule(rng: random.Random) -> Schedule:
    n, name = rng.randint(1, 4), rng.choice(["1f1b", "gpipe", "zb-h1", "fbp", "pipedream", "asp"])
    if name == "asp":
        return generate(name, 1, 1, mini_batches=rng.randint(1, 9), replicas=(rng.randint(1, 4),))
    if name == "pipedream":
        replicas = [rng.randint(1, 3) for _ in range(n)]
        alone = n > 1 and replicas[0] == replicas[-1] == 1
        return generate(
            name, n, 1, mini_batches=rng.randint(1, 9), replicas=replicas,
            tied=[(0, [n - 1])] if alone else [],
        )  # fmt: skip
    replicas = [] if name == "fbp" else [rng.randint(1, 3) for _ in range(n)]
    tied = [(0, [n - 1])] if n > 1 and rng.random() < 0.5 else []
    return generate(name, n, rng.randint(1, 7), tied=tied, replicas=replicas)


def random_times(rng: random.Random, schedule: Schedule, chunks: bool = True) -> StageTimes:
    n = 1 + max(action.stage for row in schedule for action in row)
    hops = [tuple(map(Transfer, seconds(rng, k), seconds(rng, k))) for k in (n - 1, n - 1, n)]
    streams = tuple(rng.choice([1, 1, 2, 3, math.inf]) for _ in range(n)) if chunks else ()
    return StageTimes(
        seconds(rng, n), seconds(rng, n), seconds(rng, n), hops[0], hops[1],
        {(0, n - 1): Transfer(0.5, 0.25)}, input_s=seconds(rng, n), weight_s=seconds(rng, n),
        chunks=streams, all_reduce_s=seconds(rng, n), gradient_links=hops[2],
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(200))
def test_unshared_media_change_nothing(seed: int) -> None:
    """Compare the spans with ends computed at once and with ends from events."""
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    times = random_times(rng, schedule)
    unused = replace(times, tied={**times.tied, (98, 99): Transfer(0.0, 0.0, BUS)})
    assert unused.shares_media
    assert not times.shares_media
    spans, others = simulate(schedule, times).spans, simulate(schedule, unused).spans
    expected = sorted((s.worker, s.action, s.start_s, s.end_s) for s in spans)
    actual = sorted((s.worker, s.action, s.start_s, s.end_s) for s in others)
    assert [each[:2] for each in actual] == [each[:2] for each in expected]
    ends_s = [second for each in expected for second in each[2:]]
    assert [s for each in actual for s in each[2:]] == pytest.approx(ends_s, rel=1e-12, abs=1e-12)


def on_one_bus(times: StageTimes) -> StageTimes:
    def share(links: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(link._replace(media=BUS) for link in links)

    return replace(
        times,
        forward_links=share(times.forward_links),
        backward_links=share(times.backward_links),
        gradient_links=share(times.gradient_links),
        tied={way: link._replace(media=BUS) for way, link in times.tied.items()},
    )


@pytest.mark.parametrize("seed", range(150))
def test_a_bus_carries_all_bytes_and_no_more(seed: int) -> None:
    """The bus is busy for all bytes over its bandwidth, so the step takes at least that long.

    It neither idles nor carries two messages at full speed.
    """
    rng = random.Random(seed)
    schedule = random_schedule(rng)
    times = on_one_bus(random_times(rng, schedule, chunks=False))
    workers, timeline = row_workers(schedule), simulate(schedule, times)
    home: dict[object, list[int]] = {}
    for row, action in ((row, a) for row, actions in enumerate(schedule) for a in actions):
        if action.op.is_receive:
            home.setdefault(action.message, []).append(workers[row])
    on_bus, work_s = [], 0.0
    for span in (span for span in timeline.spans if span.action.op.is_send):
        message = span.action.message
        assert message is not None
        if set(home[message]) != {workers[span.worker]}:
            transfer = times.transfer(message)
            on_bus.append((span.start_s, span.end_s - transfer.latency_s))
            work_s += transfer.occupancy_s
    busy_s, until_s = 0.0, 0.0
    for start_s, end_s in sorted(on_bus):
        busy_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    assert busy_s == pytest.approx(work_s, rel=1e-9, abs=1e-9)
    assert work_s <= timeline.step_s * (1 + 1e-12)


def fluid_step_s(schedule: Schedule, times: StageTimes) -> float:
    """Return the step by a simple model in fractions that jumps to the next end of anything in
    progress.

    It has one row per worker, no sums and no chunks.
    """
    home = {action.stage: row for row, actions in enumerate(schedule) for action in actions}
    at, left = [0] * len(schedule), [Fraction(0)] * len(schedule)
    begun = [False] * len(schedule)
    edges: dict[tuple[int, int], list[list]] = {}  # lists of [message, remaining work]
    late: list[list] = []  # [message, remaining latency]
    arrived, now = set(), Fraction(0)

    def move(row: int) -> bool:
        """Do the next action of a row if nothing blocks it; return whether it was done."""
        if at[row] == len(schedule[row]):
            return False
        action = schedule[row][at[row]]
        if action.op.is_compute:
            if not begun[row]:
                begun[row], left[row] = True, Fraction(times.compute_s(action))
            if left[row]:
                return False
            begun[row] = False
        elif action.op.is_send:
            message = action.message
            edge = row, home[message.target]
            edges.setdefault(edge, []).append(
                [message, Fraction(times.transfer(message).occupancy_s)]
            )
        elif action.message not in arrived:
            return False
        at[row] += 1
        return True

    def flow() -> bool:
        """Take one finished message off its edge, or out of its latency."""
        for queue in edges.values():
            if queue and queue[0][1] == 0:
                message = queue.pop(0)[0]
                late.append([message, Fraction(times.transfer(message).latency_s)])
                return True
        for each in [each for each in late if each[1] == 0]:
            late.remove(each)
            arrived.add(each[0])
            return True
        return False

    while True:
        while sum(map(move, range(len(schedule)))) or flow():
            pass
        heads = [queue[0] for queue in edges.values() if queue]
        on = [medium for head in heads for medium in times.transfer(head[0]).media]
        speeds = [
            Fraction(1, max([on.count(m) for m in times.transfer(head[0]).media] or [1]))
            for head in heads
        ]
        ends = [head[1] / speed for head, speed in zip(heads, speeds, strict=True)]
        ends += [each[1] for each in late] + [rest for rest in left if rest]
        if not ends:
            assert at == [len(row) for row in schedule]
            return float(now)
        step = min(ends)
        now += step
        left = [max(rest - step, Fraction(0)) for rest in left]
        for head, speed in zip(heads, speeds, strict=True):
            head[1] -= step * speed
        for each in late:
            each[1] -= step


@pytest.mark.parametrize("seed", range(80))
def test_random_media_agree_with_a_fluid_model(seed: int) -> None:
    rng = random.Random(seed)
    n, m = rng.randint(2, 5), rng.randint(1, 6)
    schedule = generate(rng.choice(["1f1b", "gpipe", "zb-h1", "1f1b-so"]), n, m)

    def quarters(count: int) -> tuple[float, ...]:
        return tuple(rng.randint(0, 12) / 4 for _ in range(count))

    def hops() -> tuple[Transfer, ...]:
        media = [tuple(rng.sample("xyz", rng.randint(0, 3))) for _ in range(n - 1)]
        return tuple(map(Transfer, quarters(n - 1), quarters(n - 1), media))

    times = StageTimes(quarters(n), quarters(n), quarters(n), hops(), hops())
    last_s = max(
        (s.end_s for s in simulate(schedule, times).spans), default=0.0
    )  # the first pass may be later than 0, since passes may take no time
    assert last_s == pytest.approx(fluid_step_s(schedule, times), rel=1e-12)


def test_the_same_input_gives_the_same_timeline() -> None:
    rng = random.Random(5)
    for _ in range(20):
        schedule = random_schedule(rng)
        times = on_one_bus(random_times(rng, schedule))
        assert simulate(schedule, times) == simulate(schedule, times)


@pytest.mark.parametrize(("n", "m"), [(2, 2), (2, 32), (3, 8), (5, 8), (5, 32)])
@pytest.mark.parametrize("transfer_s", [1.0, 5.0, 10.0])
def test_fbp_hides_transfers_on_half_duplex_links(n: int, m: int, transfer_s: float) -> None:
    """The step is (M + N - 1)(F + B) if a link moves both messages while both passes compute."""
    media = [(f"link {stage}",) for stage in range(n - 1)]
    hops = tuple(Transfer(0.0, transfer_s, each) for each in media)
    times = StageTimes((10.0,) * n, (10.0,) * n, (), hops, hops, chunks=(math.inf,) * n)
    step_s = simulate(generate("fbp", n, m), times).step_s
    assert step_s == pytest.approx((m + n - 1) * 20, rel=1e-9)


def test_transfers_set_the_pace_if_all_links_share_a_bus() -> None:
    """Four stages send 6 messages per micro-batch: at 5 s each they take 30 s, compute 20 s."""
    n, m = 4, 32
    hops = (Transfer(0.0, 5.0, BUS),) * (n - 1)
    times = StageTimes((10.0,) * n, (10.0,) * n, (), hops, hops, chunks=(math.inf,) * n)
    step_s = simulate(generate("fbp", n, m), times).step_s
    assert m * 30 <= step_s < (m + n) * 30


def test_a_deadlock_names_the_action() -> None:
    """Check a sum that another replica never joins, and a message on a bus."""
    times = StageTimes((1.0,), (1.0,), all_reduce_s=(1.0,))
    stuck = (
        tuple(map(Action.parse, ("0B0", "0A", "0U"))),
        tuple(map(Action.parse, ("0RF0", "0B1", "0A", "0U"))),
    )
    with pytest.raises(ScheduleError, match="worker 0 waits for ever in 0U"):
        simulate(stuck, times)
    bus = (Transfer(0.0, 1.0, BUS),)
    ways = StageTimes((1.0, 1.0), (1.0, 1.0), (), bus, bus)
    with pytest.raises(ScheduleError, match="worker 0 waits for ever in 0RB0"):
        simulate(parse_schedule("0RB0 0F0 0SF0\n1RF0 1SB0"), ways)
