"""Streams: segments and a flush form the whole schedule, at any length."""

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.action import Action, Op
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import register_schedule
from hetpipe.schedule.stream import Stream


def noam(stages):
    return [stages - n for n in range(stages)]


def hiding(stages):
    return [2 * (stages - n) - 1 for n in range(stages)]


TIES = {
    1: [],
    2: [(0, [1])],
    3: [(0, [1, 2]), (1, [2])],
    4: [(0, [3]), (1, [2, 3]), (2, [3])],
}


@pytest.mark.parametrize("stages", TIES)
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("depth", [noam, hiding])
@pytest.mark.parametrize("is_tied", [False, True])
def test_segments_and_flush_form_the_schedule(stages, microbatches, depth, is_tied):
    tied = TIES[stages] if is_tied else []
    stream = Stream("pipedream", stages, microbatches, depth(stages), tied=tied)
    for count in range(1, 3 * stages + 6):
        parts = [*map(stream.segment, range(count)), stream.flush(count)]
        rows = tuple(
            tuple(
                a.later(part.first, microbatches) for part in parts for a in part.schedule[worker]
            )
            for worker in range(stages)
        )
        assert rows == generate(
            "pipedream", stages, microbatches, in_flight=depth(stages), mini_batches=count,
            tied=tied,
        )  # fmt: skip


@pytest.mark.parametrize("depth", [noam, hiding])
def test_updates_around_a_micro_batch_match_the_paper(depth):
    """In a straight pipeline with K forwards in flight, max(0, b - K + 1) updates come before the
    forward of micro-batch b, and min(b, K - 1) more before its backward."""
    depths = depth(4)
    stream = Stream("pipedream", 4, 1, depths)
    for stage, in_flight in enumerate(depths):
        for b in range(40):
            assert stream.applied(stage, b) == max(0, b - in_flight + 1)
            assert stream.ahead(stage, b) == min(b, in_flight - 1)


def test_an_update_follows_the_last_of_several_micro_batches():
    stream = Stream("pipedream", 2, 2)  # stage 0: F0 F1 B0 F2 B1 U0 F3 B2 F4 B3 U1 ...
    assert [stream.applied(0, m) for m in range(6)] == [0, 0, 0, 1, 1, 2]
    assert [stream.ahead(0, m) for m in range(6)] == [0, 0, 1, 0, 1, 0]
    assert [stream.applied(1, m) for m in range(6)] == [0, 0, 1, 1, 2, 2]


def test_later_segments_differ_only_in_numbers():
    stream = Stream("pipedream", 3, 1)
    assert stream.segment(1000).schedule is stream.segment(50).schedule  # so it is sent once
    assert stream.segment(1000).first - stream.segment(50).first == 950


def test_a_schedule_that_never_settles_is_refused(monkeypatch):
    import hetpipe.schedule.rule as module

    monkeypatch.setattr(module, "_rules", dict(module._rules))

    @register_schedule("pairs", asynchronous=True)
    def pairs(stages, microbatches, in_flight):
        """Return two forwards, then two backwards, ...; odd and even mini-batches differ."""
        order = []
        for first in range(0, microbatches, 2):
            both = range(first, min(first + 2, microbatches))
            order += [(op, m) for op in (Op.FORWARD, Op.BACKWARD) for m in both]
        return (tuple(Action(0, op, m) for op, m in order),)

    with pytest.raises(ScheduleError, match="pairs does not repeat itself on worker 0"):
        Stream("pairs", 1, 1)
