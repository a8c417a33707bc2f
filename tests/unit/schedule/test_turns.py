"""Schedules whose replicas take mini-batches in turn (1F1B-RR): order, refusals, time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import PER_MINI_BATCH, Action, Op
from hetpipe.schedule.generators import generate
from hetpipe.schedule.stream import Stream
from hetpipe.schedule.turns import noam
from hetpipe.schedule.validate import validate
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import StageTimes

CASES = [(2, 1), (1, 2), (3, 1), (2, 3), (1, 2, 1), (15, 1)]


def passes(row):
    return [str(a)[1:] for a in row if len(a.op) == 1]


def test_the_papers_pipeline_with_2_and_1_replicas():
    """In PipeDream's figure 8 one replica takes even mini-batches and the other odd ones."""
    even, odd, last = generate("pipedream", 2, 1, mini_batches=5, replicas=(2, 1))
    assert passes(even) == ["F0", "F2", "B0", "A1", "U1", "F4", "B2", "A3", "U3", "B4", "A4", "U4"]
    assert passes(odd) == ["F1", "F3", "B1", "A1", "U1", "B3", "A3", "U3", "A4", "U4"]
    assert passes(last)[:9] == ["F0", "B0", "U", "F1", "B1", "U1", "F2", "B2", "U2"]


@pytest.mark.parametrize(
    ("replicas", "depths"),
    [((2, 1), [2, 1]), ((15, 1), [2, 1]), ((1, 1, 1), [3, 2, 1]), ((2, 1, 1), [2, 2, 1])],
)
def test_noam_is_workers_over_input_replicas(replicas, depths):
    assert noam(replicas) == depths


@pytest.mark.parametrize("replicas", CASES, ids=str)
def test_segments_and_flush_form_the_schedule(replicas):
    stages = len(replicas)
    stream = Stream("pipedream", stages, 1, noam(replicas), replicas)
    for count in (*range(1, 8), stream.window + 3, 2 * stream.window + 5):
        parts = [*map(stream.segment, range(count)), stream.flush(count)]
        rows = tuple(
            tuple(
                replace(a, number=a.number + part.first) for part in parts for a in part.schedule[w]
            )
            for w in range(sum(replicas))
        )
        assert rows == generate("pipedream", stages, 1, mini_batches=count, replicas=replicas)


@pytest.mark.parametrize("replicas", CASES, ids=str)
def test_no_segment_waits_for_a_later_one(replicas):
    stream = Stream("pipedream", len(replicas), 1, noam(replicas), replicas)
    sent, summed = {}, {}
    for b in range(2 * stream.window):
        segment = stream.segment(b)
        for row in segment.schedule:
            for action in row:
                own = replace(action, number=action.number + segment.first)
                if own.op in PER_MINI_BATCH:
                    summed.setdefault(own, []).append(b)
                elif own.op is Op.FORWARD:
                    assert own.number == b
                elif own.message is not None:
                    sent.setdefault(own.message, [None, None])[own.op.is_receive] = b
    for ends in sent.values():
        assert ends[1] is None or ends[0] <= ends[1]
    for action, at in summed.items():
        if action.op is Op.ALL_REDUCE:
            assert len(set(at)) == 1


@pytest.mark.parametrize("replicas", CASES, ids=str)
def test_updates_around_a_mini_batch_match_a_straight_pipeline(replicas):
    depths = noam(replicas)
    stream = Stream("pipedream", len(replicas), 1, depths, replicas)
    for stage, (depth, count) in enumerate(zip(depths, replicas, strict=True)):
        for b in range(3 * stream.window):
            assert stream.applied(stage, b) == max(0, b // count - depth + 1)
            assert stream.ahead(stage, b) == min(b // count, depth - 1)


def edit_row(schedule, row, edit):
    rows = [list(actions) for actions in schedule]
    edit(rows[row])
    return tuple(map(tuple, rows))


@pytest.mark.parametrize(
    ("row", "edit", "message"),
    [
        (0, lambda row: row.remove(Action(0, Op.BACKWARD, 2)), "2, which it needs|missing"),
        (1, lambda row: row.append(Action(0, Op.FORWARD, 0)), "0F0 has no place"),
        (1, lambda row: row.remove(Action(0, Op.UPDATE, 1)), "0U1 is missing"),
        (0, lambda row: row.insert(0, row.pop(row.index(Action(0, Op.UPDATE, 1)))), "come last"),
        (0, lambda row: row.insert(0, Action(1, Op.FORWARD, 1)), "row 0 is not of stage 1"),
    ],
)
def test_faults_are_found(row, edit, message):
    schedule = generate("pipedream", 2, 1, mini_batches=4, replicas=(2, 1))
    validate(schedule, 1, None, 4, (2, 1))
    with pytest.raises(ScheduleError, match=message):
        validate(edit_row(schedule, row, edit), 1, None, 4, (2, 1))


def test_a_sum_in_a_cycle_of_waits_is_a_deadlock():
    """One replica waits in the sum for the other, which waits for an action after the sum."""
    schedule = generate("pipedream", 2, 1, mini_batches=4, replicas=(1, 2), in_flight=[1, 1])
    late, send = [list(row) for row in schedule], Action(1, Op.SEND_BACKWARD, 0)
    late[1].remove(send)
    late[1].insert(late[1].index(Action(1, Op.UPDATE, 1)), send)
    with pytest.raises(ScheduleError, match="worker 1 waits in 1A1 for worker 2"):
        validate(tuple(map(tuple, late)), 1, None, 4, (1, 2))


@pytest.mark.parametrize(("replicas", "forward_s"), [((2, 1), (2.0, 1.0)), ((3, 1), (3.0, 1.0))])
def test_balanced_replicas_keep_all_workers_busy(replicas, forward_s):
    """In PipeDream's figure 8 the first stage takes R times as long and has R replicas."""
    count = 60
    schedule = generate("pipedream", 2, 1, mini_batches=count, replicas=replicas)
    timeline = simulate(schedule, StageTimes(forward_s, forward_s))
    ends_s = [s.end_s for s in timeline.spans if str(s.action).startswith("1U")]
    assert (ends_s[-10] - ends_s[20]) / (count - 30) == pytest.approx(2.0)


def test_a_sum_begins_when_all_replicas_are_ready():
    schedule = generate("pipedream", 1, 1, mini_batches=4, replicas=(2,))
    timeline = simulate(schedule, StageTimes((1.0,), (2.0,), all_reduce_s=(0.5,)))
    sums = [(s.start_s, s.end_s) for s in timeline.spans if s.action.op is Op.ALL_REDUCE]
    assert sums == [(3.0, 3.5), (3.0, 3.5), (6.5, 7.0), (6.5, 7.0)]
