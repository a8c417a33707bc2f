"""The simulator compared with closed forms in their domains, and with a plain recursion."""

import json
import math
import random
import subprocess
import sys
from functools import cache

import pytest

from hetpipe.errors import HetpipeError, ScheduleError
from hetpipe.schedule.action import Action
from hetpipe.schedule.generators import generate
from hetpipe.schedule.text import parse_schedule
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.simulate.times import StageTimes, Transfer


def equal_stages(stages, forward, backward, transfer=0, chunks=1):
    links = (Transfer(0, transfer),) * (stages - 1)
    passes = (forward,) * stages, (backward,) * stages
    return StageTimes(*passes, (), links, links, chunks=(chunks,) * stages)


SIZES = [(n, m) for n in range(2, 7) for m in (2, 3, 5, 8, 17, 32)]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 4), *SIZES])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_fill_formula_without_transfers(name, n, m):
    timeline = simulate(generate(name, n, m), equal_stages(n, 10, 20))
    assert timeline.step_s == (m + n - 1) * 30
    assert timeline.busy_share() == pytest.approx([m / (m + n - 1)] * n)


def exposed(n, m):
    """Return the round trips of transfers that 1F1B does not hide."""
    return n + m - 2 - math.ceil((m - 1) / n)


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("transfer", [1, 5, 30])
def test_1f1b_sno_of_bapipe(n, m, transfer):
    """Table 1 of BaPipe: transfers are not hidden; exact for any transfer."""
    timeline = simulate(generate("1f1b-sno", n, m), equal_stages(n, 10, 20, transfer))
    assert timeline.step_s == (m + n - 1) * 30 + exposed(n, m) * 2 * transfer


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("transfer", [1, 5, 10])
def test_1f1b_so_of_bapipe(n, m, transfer):
    """Transfers hide behind compute while SR <= min(F, B); DAPPLE's P_B is one less deep."""
    depths = [2 * (n - stage) - 1 for stage in range(n)]
    times = equal_stages(n, 10, 20, transfer)
    for schedule in (generate("1f1b-so", n, m), generate("1f1b", n, m, in_flight=depths)):
        assert simulate(schedule, times).step_s == (m + n - 1) * 30 + (n - 1) * 2 * transfer


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("transfer", [1, 5, 10])
def test_1f1b_as_of_bapipe(n, m, transfer):
    """Asynchronous devices hide transfers except the last chunk while SR <= min(F, B)."""
    schedule = generate("1f1b-as", n, m)
    filled = (m + n - 1) * 30
    streaming = simulate(schedule, equal_stages(n, 10, 20, transfer, chunks=math.inf))
    assert streaming.step_s == filled
    chunked = simulate(schedule, equal_stages(n, 10, 20, transfer, chunks=4))
    assert chunked.step_s == filled + exposed(n, m) * 2 * transfer / 4


@pytest.mark.parametrize(("n", "m"), SIZES)
def test_naive_does_one_thing_at_a_time(n, m):
    timeline = simulate(generate("naive", n, m), equal_stages(n, 10, 20, 5))
    assert timeline.step_s == m * (n * 30 + (n - 1) * 2 * 5)


def test_the_closed_form_of_so_is_too_low_outside_its_domain():
    """Use BaPipe's formula at F = 10, B = 20, SR = 30 ms, where the edge sets the pace."""
    times = equal_stages(4, 10, 20, 30)
    closed = (32 + 3) * 30 + 3 * 2 * 30
    assert simulate(generate("1f1b-so", 4, 32), times).step_s > 1.2 * closed


def test_a_drawn_example_with_latency_and_occupancy():
    """Two messages share the edge's bandwidth one after the other; their latencies overlap."""
    times = StageTimes((1.0, 1.0), (1.0, 1.0), (0.5, 0.25), (Transfer(3, 2),), (Transfer(0, 0),))
    spans = {
        str(s.action): (s.start_s, s.end_s) for s in simulate(generate("gpipe", 2, 2), times).spans
    }
    assert spans == {
        "0F0": (0, 1), "0SF0": (1, 6), "0F1": (1, 2), "0SF1": (3, 8),
        "1RF0": (0, 6), "1F0": (6, 7), "1RF1": (7, 8), "1F1": (8, 9),
        "1B0": (9, 10), "1SB0": (10, 10), "1B1": (10, 11), "1SB1": (11, 11), "1U": (11, 11.25),
        "0RB0": (2, 10), "0B0": (10, 11), "0RB1": (11, 11), "0B1": (11, 12), "0U": (12, 12.5),
    }  # fmt: skip


def sends(schedule, times):
    return {
        str(s.action): (s.start_s, s.end_s)
        for s in simulate(schedule, times).spans
        if s.action.op.is_send
    }


def test_an_asynchronous_stage_sends_while_it_computes():
    """Four chunks are ready at 1, 2, 3 and 4: a fast link waits for the last, a slow one starts."""
    schedule = generate("gpipe", 2, 2)

    def times(occupancy_s):
        hop = (Transfer(0.5, occupancy_s),)
        return StageTimes((4, 4), (4, 4), (), hop, hop, chunks=(4, 1))

    quick, slow = sends(schedule, times(2)), sends(schedule, times(8))
    assert (quick["0SF0"], quick["0SF1"]) == ((1, 5), (5, 9))
    assert (slow["0SF0"], slow["0SF1"]) == ((1, 9.5), (9, 17.5))
    assert quick["1SB0"] == (17, 19.5)  # stage 1 is synchronous


def test_a_send_apart_from_its_pass_leaves_at_once():
    """Another action runs between them, so the output is already complete."""
    hop = (Transfer(0, 2.0),)
    apart = parse_schedule("0F0 0F1 0SF0 0SF1 0RB0 0B0 0RB1 0B1 0U\n" + LAST)
    found = sends(apart, StageTimes((4, 4), (4, 4), (), hop, hop, chunks=(4, 4)))
    assert (found["0SF0"], found["0SF1"]) == ((8, 10), (10, 12))


LAST = "1RF0 1F0 1RF1 1F1 1B0 1SB0 1B1 1SB1 1U"


def test_halves_of_a_backward_take_half_of_it_by_default():
    inputs, weights = Action.parse("1I0"), Action.parse("1W0")
    times = StageTimes((1, 1), (2, 6))
    assert (times.compute_s(inputs), times.compute_s(weights)) == (3, 3)
    times = StageTimes((1, 1), (2, 6), input_s=(1, 5), weight_s=(1, 2))
    assert (times.compute_s(inputs), times.compute_s(weights)) == (5, 2)


def ends_by_recursion(schedule, times):
    """Return every action's end by recursion over the actions it waits for: no events, no clock."""
    home = {action.stage: w for w, row in enumerate(schedule) for action in row}
    posted = {}  # message -> (worker, index)
    edges = {}  # (worker, worker) -> messages in the order of posting
    for w, row in enumerate(schedule):
        for i, action in enumerate(row):
            if action.op.is_send:
                posted[action.message] = (w, i)
                edges.setdefault((w, home[action.message.target]), []).append(action.message)

    @cache
    def end(w, i):
        if i < 0:
            return 0.0
        action = schedule[w][i]
        if action.op.is_receive:
            return max(end(w, i - 1), arrival(action.message))
        return end(w, i - 1) + (times.compute_s(action) if action.op.is_compute else 0.0)

    @cache
    def left(message):
        """Return when its last byte leaves the edge: after the previous message, chunk by chunk."""
        edge = edges[home[message.source], home[message.target]]
        turn = edge.index(message)
        free = left(edge[turn - 1]) if turn else 0.0
        w, i = posted[message]
        chunks = times.chunks[message.source] if times.chunks and message.kind in "FB" else 1
        length = end(w, i) - end(w, i - 2) if chunks > 1 else 0.0  # duration of the preceding pass
        for chunk in range(chunks):
            ready = end(w, i) - length * (chunks - 1 - chunk) / chunks
            free = max(free, ready) + times.transfer(message).occupancy_s / chunks
        return free

    def arrival(message):
        if home[message.source] == home[message.target]:
            return end(*posted[message])
        return left(message) + times.transfer(message).latency_s

    return {row[i]: end(w, i) for w, row in enumerate(schedule) for i in range(len(row))}


def random_case(seed):
    rng = random.Random(seed)
    n, m = rng.randint(1, 6), rng.randint(1, 9)
    some = lambda k: tuple(rng.uniform(0.1, 3) for _ in range(k))  # noqa: E731
    hops = lambda k: tuple(Transfer(*some(2)) for _ in range(k))  # noqa: E731
    tied = [(0, [n - 1])] if n > 1 and rng.random() < 0.5 else []
    edges = {(0, n - 1): Transfer(*some(2)), (n - 1, 0): Transfer(*some(2))} if tied else {}
    chunks = tuple(rng.randint(1, 4) for _ in range(n)) if rng.random() < 0.5 else ()
    times = StageTimes(
        some(n), some(n), some(n), hops(n - 1), hops(n - 1), edges,
        input_s=some(n), weight_s=some(n), chunks=chunks,
    )  # fmt: skip
    depths = [rng.randint(1, 3)]
    while len(depths) < n:
        depths.append(depths[-1] + rng.randint(0, 3))
    in_flight = rng.choice([None, depths[::-1]])
    name = rng.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zb-v"])
    workers = n
    if name == "interleaved":
        workers = rng.choice([d for d in range(1, n + 1) if n % d == 0 and m % d == 0])
    elif name == "zb-v" and n % 2 == 0:
        workers = n // 2
    else:
        name = name.replace("zb-v", "1f1b")
    depths = in_flight if name == "1f1b" else None
    return generate(name, n, m, in_flight=depths, tied=tied, workers=workers), times


@pytest.mark.parametrize("seed", range(150))
def test_random_pipelines_agree_with_the_recursion(seed):
    schedule, times = random_case(seed)
    expected = ends_by_recursion(schedule, times)
    timeline = simulate(schedule, times)
    assert len(timeline.spans) == len(expected)
    for span in timeline.spans:
        if not span.action.op.is_send:
            assert span.end_s == pytest.approx(expected[span.action], rel=1e-12), str(span.action)
    assert simulate(schedule, times) == timeline


def test_a_send_to_its_own_worker_is_a_hand_over():
    row = "0F0 0SF0 1RF0 1F0 1B0 1SB0 0RB0 0B0 0U 1U"
    schedule = (tuple(map(Action.parse, row.split())),)
    slow = (Transfer(100, 100),)
    assert simulate(schedule, StageTimes((1, 1), (2, 2), (), slow, slow)).step_s == 6


def test_overhead_is_separate_from_the_spans():
    times = StageTimes((1.0,), (2.0,), step_overhead_s=0.5)
    timeline = simulate(generate("gpipe", 1, 2), times)
    assert (timeline.step_s, timeline.total_s) == (6.0, 6.5)


def test_inconsistent_arguments_are_refused():
    schedule = generate("gpipe", 2, 1)
    with pytest.raises(ScheduleError, match="2 stages on 2 workers, but there are times for 3"):
        simulate(schedule, StageTimes((1, 1, 1), (1, 1, 1)))
    with pytest.raises(ScheduleError, match="names for 1 workers"):
        simulate(schedule, StageTimes((1, 1), (1, 1)), workers=["a"])
    with pytest.raises(ScheduleError, match="backward_s has 1 entries, 2 stages need 2"):
        StageTimes((1, 1), (1,))
    with pytest.raises(ScheduleError, match="weight_s has 1 entries, 2 stages need 2"):
        StageTimes((1, 1), (1, 1), weight_s=(1,))
    with pytest.raises(ScheduleError, match=r"chunks \[1, 0\]: each must be 1 or more"):
        StageTimes((1, 1), (1, 1), chunks=(1, 0))
    with pytest.raises(ScheduleError, match="forward_links has 2 entries, 2 stages need 1"):
        StageTimes((1, 1), (1, 1), forward_links=(Transfer(), Transfer()))


def test_a_schedule_that_deadlocks_does_not_end_silently():
    stuck = tuple(tuple(map(Action.parse, row.split())) for row in ("0RB0 0F0 0SF0", "1RF0 1SB0"))
    with pytest.raises(ScheduleError, match="gpu waits for ever in 0RB0"):
        simulate(stuck, StageTimes((1, 1), (1, 1)), workers=["gpu", "cpu"])


def test_timelines_survive_json():
    timeline = simulate(generate("1f1b", 3, 4, tied=[(0, [2])]), equal_stages(3, 0.1, 0.2, 0.3))
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline
    with pytest.raises(HetpipeError, match="version 9, this hetpipe reads 1"):
        Timeline.from_json({**timeline.to_json(), "version": 9})
    with pytest.raises(HetpipeError, match="lacks the key 'workers'"):
        Timeline.from_json({"version": 1, "spans": []})


def test_twice_the_depth_hides_transfers():
    """With DAPPLE's P_B no worker waits for a message, except at both ends of the step."""
    link = (Transfer(latency_s=1.0, occupancy_s=4.0),)
    times = StageTimes((10.0, 10.0), (20.0, 20.0), (), link, link)
    share = {}
    for depth in ((2, 1), (3, 1)):
        timeline = simulate(generate("1f1b", 2, 16, in_flight=depth), times)
        total_s, hidden_s = timeline.under_way_s()
        assert total_s == pytest.approx(2 * 16 * 5.0)
        share[depth] = hidden_s / total_s
    assert share[2, 1] < 0.5
    assert share[3, 1] > 0.85


def test_shares_of_an_empty_and_of_a_late_timeline():
    assert Timeline((), (), "measured").step_s == 0.0
    assert Timeline(("a",), (), "measured").busy_share() == (0.0,)
    spans = (Span(0, Action.parse("0F0"), 5.0, 6.0), Span(0, Action.parse("0B0"), 8.0, 9.0))
    assert Timeline(("a",), spans, "measured").busy_share() == (0.5,)


def test_planner_and_simulator_import_neither_torch_nor_pyopencl():
    rooms = ("schedule", "simulate", "plan", "cluster", "cost")
    code = (
        "import importlib, pkgutil, sys\n"
        f"for room in {rooms}:\n"
        "    package = importlib.import_module(f'hetpipe.{room}')\n"
        "    for name in package.__all__: getattr(package, name)\n"
        "print([name for name in ('torch', 'pyopencl') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
