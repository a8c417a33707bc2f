"""Asynchronous data parallelism: the order of actions, its delay, its refusals and its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import PER_MINI_BATCH, Action, Op, Schedule
from hetpipe.schedule.generators import generate
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.text import parse_schedule, print_schedule
from hetpipe.schedule.validate import validate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes, Transfer

REPLICAS = [1, 2, 3, 5]


def asp(replicas: int, mini_batches: int, microbatches: int = 1) -> Schedule:
    return generate("asp", 1, microbatches, mini_batches=mini_batches, replicas=(replicas,))


def test_two_replicas() -> None:
    assert print_schedule(asp(2, 5)).splitlines() == [
        "worker 0: 0F0 0B0 0SA 0U 0F2 0B2 0SA2 0RA1 0U1 0U2 0F4 0B4 0SA4 0RA3 0U3 0U4",
        "worker 1: 0F1 0B1 0SA1 0RA 0U 0U1 0F3 0B3 0SA3 0RA2 0U2 0U3 0RA4 0U4",
    ]


def test_asp_schedules_print_and_parse() -> None:
    schedule = asp(3, 7, 2)
    assert parse_schedule(print_schedule(schedule)) == schedule


def test_more_replicas_than_mini_batches() -> None:
    assert print_schedule(asp(3, 1)).splitlines() == [
        "worker 0: 0F0 0B0 0SA 0U", "worker 1: 0RA 0U", "worker 2: 0RA 0U",
    ]  # fmt: skip


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_segments_and_flush_form_the_schedule(replicas: int, microbatches: int) -> None:
    stream = Stream("asp", 1, microbatches, None, (replicas,))
    for count in (*range(1, 3 * replicas + 3), 2 * stream.window + 5):
        parts = [*map(stream.segment, range(count)), stream.flush(count)]
        rows = tuple(
            tuple(
                later(a, part.first, microbatches) for part in parts for a in part.schedule[worker]
            )
            for worker in range(replicas)
        )
        assert rows == asp(replicas, count, microbatches)


def later(action: Action, mini_batches: int, microbatches: int) -> Action:
    each = 1 if action.op in PER_MINI_BATCH else microbatches
    return replace(action, number=action.number + mini_batches * each)


@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_the_delay_of_a_gradient_is_one_less_than_the_replicas(
    replicas: int, microbatches: int
) -> None:
    stream = Stream("asp", 1, microbatches, None, (replicas,))
    for m in range(5 * stream.window * microbatches):
        assert stream.applied(0, m) == max(0, m // microbatches - replicas + 1)
        assert stream.ahead(0, m) == 0


@pytest.mark.parametrize("replicas", REPLICAS)
def test_no_segment_waits_for_a_later_one(replicas: int) -> None:
    stream = Stream("asp", 1, 1, None, (replicas,))
    sent: dict[int, int] = {}
    for b in range(3 * stream.window):
        segment = stream.segment(b)
        cells = [later(a, segment.first, 1) for row in segment.schedule for a in row]
        sent.update({a.number: b for a in cells if a.op is Op.SEND_GRAD})
        assert all(a.number in sent for a in cells if a.op is Op.RECV_GRAD)
        assert all(a.number == b for a in cells if a.op is Op.FORWARD)


def edit_row(schedule: Schedule, row: int, edit: Callable[[list[Action]], object]) -> Schedule:
    rows = [list(actions) for actions in schedule]
    edit(rows[row])
    return tuple(map(tuple, rows))


def at(row: list[Action], text: str) -> int:
    return row.index(Action.parse(text))


def move(text: str, before: str) -> Callable[[list[Action]], object]:
    def edit(row: list[Action]) -> None:
        row.remove(Action.parse(text))
        row.insert(at(row, before), Action.parse(text))

    return edit


FAULTS: dict[str, tuple[int, Callable[[list[Action]], object], str]] = {
    "no receive": (1, lambda row: row.pop(at(row, "0RA")), "0RA is missing"),
    "no send": (0, lambda row: row.pop(at(row, "0SA2")), "0SA2 is missing"),
    "no update": (1, lambda row: row.pop(at(row, "0U2")), "0U2 is missing"),
    "two receives": (1, lambda row: row.append(Action.parse("0RA2")), "0RA2 occurs twice"),
    "its own": (0, lambda row: row.append(Action.parse("0RA")), "0RA has no place"),
    "another's": (1, lambda row: row.insert(0, Action.parse("0SA")), "0SA has no place"),
    "a sum too": (1, lambda row: row.insert(0, Action.parse("0A")), "0A has no place"),
    "swapped updates": (0, move("0U2", "0U1"), "0U2 comes before the update of mini-batch 1"),
    "sent too early": (0, move("0SA2", "0B2"), "0SA2 comes before 0B2, which it needs"),
    "applied too early": (0, move("0U1", "0RA1"), "0U1 comes before 0RA1, which it needs"),
    "mixed when received": (
        0, move("0RA1", "0SA2"), "0RA1 comes before the gradients of mini-batch 2 are applied"
    ),
    "mixed by a backward": (
        0, move("0B4", "0U2"), "0B4 comes before the gradients of mini-batch 2 are applied"
    ),
    "others in between": (
        1, move("0RA2", "0U1"), "0U1 comes before the gradients of mini-batch 2 are applied"
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault: str) -> None:
    row, edit, message = FAULTS[fault]
    schedule = asp(2, 5)
    validate(schedule, 1, None, 5, (2,))
    if fault == "mixed by a backward":
        schedule = edit_row(schedule, 0, move("0F4", "0U2"))
    with pytest.raises(ScheduleError, match=f"{message}.*\nworker 0: "):
        validate(edit_row(schedule, row, edit), 1, None, 5, (2,))


def test_receives_must_follow_the_order_of_sends() -> None:
    """Both messages have the same sender, so the receiver would confuse them."""
    text = """
        0F0 0B0 0SA 0F2 0B2 0SA2 0U 0RA1 0U1 0U2
        0RA2 0RA 0F1 0B1 0SA1 0U 0U1 0U2
    """
    with pytest.raises(ScheduleError, match="0RA2 receives from stage 0, which sends A0 at that"):
        validate(parse_schedule(text), 1, None, 3, (2,))


def test_a_text_that_deadlocks_is_refused_with_its_grid() -> None:
    text = """
        worker 0: 0RA1 0F0 0B0 0SA0 0U0 0U1
        worker 1: 0RA0 0F1 0B1 0SA1 0U0 0U1
    """
    with pytest.raises(ScheduleError) as caught:
        validate(parse_schedule(text), 1, None, 2, (2,))
    assert str(caught.value) == (
        "deadlock: worker 0 waits in 0RA1 for worker 1, worker 1 waits in 0RA for worker 0\n"
        "worker 0: [0RA1] 0F0 0B0 0SA 0U 0U1\n"
        "worker 1: [0RA] 0F1 0B1 0SA1 0U 0U1"
    )


def test_several_stages_are_refused() -> None:
    with pytest.raises(ScheduleError, match=r"asp has 1 stage, not 2, .*: remove cuts, or use"):
        generate("asp", 2, 1, mini_batches=4, replicas=(2, 1))


def update_ends_s(replicas: int, mini_batches: int, times: StageTimes) -> list[float]:
    timeline = simulate(asp(replicas, mini_batches), times)
    spans = [s for s in timeline.spans if s.worker == 0 and s.action.op is Op.UPDATE]
    return [span.end_s for span in spans]


@pytest.mark.parametrize("replicas", REPLICAS)
def test_equal_replicas_share_the_time(replicas: int) -> None:
    """Without transfers and time for updates, R replicas are R times as fast."""
    ends_s = update_ends_s(replicas, 20 * replicas, StageTimes((1.0,), (2.0,)))
    each_s = (ends_s[15 * replicas] - ends_s[5 * replicas]) / (10 * replicas)
    assert each_s == pytest.approx(3.0 / replicas)


@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_replica_makes_all_updates(replicas: int) -> None:
    ends_s = update_ends_s(replicas, 20 * replicas, StageTimes((1.0,), (2.0,), (0.5,)))
    each_s = (ends_s[15 * replicas] - ends_s[5 * replicas]) / (10 * replicas)
    assert each_s == pytest.approx((3.0 + 0.5 * replicas) / replicas)


def test_gradients_arrive_after_their_transfer() -> None:
    """The replica sends one message to each other replica, each on a separate edge."""
    times = StageTimes((1.0,), (2.0,), gradient_links=(Transfer(0.25, 1.0),))
    timeline = simulate(asp(3, 1), times)
    sends = [s for s in timeline.spans if s.action.op is Op.SEND_GRAD]
    assert [(s.worker, s.start_s, s.end_s) for s in sends] == [(0, 3.0, 4.25)] * 2
    updates = {s.worker: s.end_s for s in timeline.spans if s.action.op is Op.UPDATE}
    assert updates == {0: 3.0, 1: 4.25, 2: 4.25}


@pytest.mark.parametrize("latency_s", [0.0, 1.0, 9.0])
def test_a_transfer_hides_behind_other_passes(latency_s: float) -> None:
    """R+1 mini-batches begin while one is computed and sent: mini-batch b needs all gradients up
    to b-R, and the last from another replica is b-R-1."""
    times = StageTimes((1.0,), (2.0,), gradient_links=(Transfer(latency_s, 0.0),))
    for replicas in (2, 3):
        ends_s = update_ends_s(replicas, 40 * replicas, times)
        span = replicas * (replicas + 1)  # whole rounds of either kind
        each_s = (ends_s[5 * span] - ends_s[3 * span]) / (2 * span)
        assert each_s == pytest.approx(max(3.0 / replicas, (3.0 + latency_s) / (replicas + 1)))
