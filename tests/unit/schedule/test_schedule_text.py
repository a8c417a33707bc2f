"""Schedules as text: printing and parsing, and refusals."""

import pytest

from hetpipe.errors import ScheduleError
from hetpipe.schedule.fixed import register_text
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import schedule_names
from hetpipe.schedule.text import parse_schedule, print_schedule
from hetpipe.schedule.validate import validate

DRAWN = """
# two stages, two micro-batches
0F0 0SF0 0F1 0SF1                    0RB0 0B0          0RB1 0B1 0U

         1RF0 1F0 1B0 1SB0 1RF1 1F1 1B1 1SB1                    1U  # the last stage
"""


@pytest.mark.parametrize("name", schedule_names())
def test_every_schedule_survives_printing_and_parsing(name):
    workers = {"zb-v": 2, "data-parallel": 1}.get(name)
    schedule = generate(name, 1 if name == "asp" else 4, 4, workers=workers)
    assert parse_schedule(print_schedule(schedule)) == schedule


def test_a_drawn_staircase_with_comments():
    assert parse_schedule(DRAWN) == generate("1f1b", 2, 2)


def test_rows_may_have_headings():
    assert parse_schedule("worker 0: 0F0 0B0 0U") == parse_schedule("0F0 0B0 0U # alone")
    assert print_schedule(parse_schedule("0F0  0B0 0U")) == "worker 0: 0F0 0B0 0U"


def test_a_deadlock_written_by_hand_is_reported_with_grid_and_cycle():
    stuck = parse_schedule("0RB0 0F0 0SF0 0B0 0U\n1RF0 1F0 1B0 1SB0 1U")
    with pytest.raises(ScheduleError) as caught:
        validate(stuck, 1)
    assert str(caught.value) == (
        "deadlock: worker 0 waits in 0RB0 for worker 1, worker 1 waits in 1RF0 for worker 0\n"
        "worker 0: [0RB0] 0F0 0SF0 0B0 0U\n"
        "worker 1: [1RF0] 1F0 1B0 1SB0 1U"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("# nothing\n\n", "no rows; write one line of actions per worker"),
        ("0F0\n0X1", "line 2: '0X1' is not an action"),
        ("0F0 0B 0U", "line 1: '0B': B takes a number"),
        ("\nworker 1: 0F0", "line 2: worker 1 where worker 0 is next"),
        ("worker 0: 0F0\nworker 0: 1F0", "line 2: worker 0 where worker 1 is next"),
    ],
)
def test_invalid_text_is_refused_with_its_line(text, message):
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text)


def test_a_written_schedule_is_known_by_its_name():
    register_text("drawn", DRAWN)
    register_text("drawn", DRAWN)
    assert generate("drawn", 2, 2) == generate("1f1b", 2, 2)
    with pytest.raises(ScheduleError, match="2 workers and 2 micro-batches, not for 3 on 3"):
        generate("drawn", 3, 2)
    with pytest.raises(ScheduleError, match="'drawn' is registered already"):
        register_text("drawn", "0F0 0B0\n1F0 1B0")


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "fbp"])
def test_missing_transfers_and_updates_are_added(name):
    workers = 2 if name in ("zb-v", "interleaved") else None
    whole = generate(name, 4, 4, workers=workers)
    kept = ("F", "B", "I", "W", "SK", "RK", "SV", "RV")
    rows = [" ".join(str(a) for a in row if a.op.value in kept) for row in whole]
    register_text(f"passes of {name}", "\n".join(rows))
    assert generate(f"passes of {name}", 4, 4, workers=workers) == whole


def test_a_written_deadlock_is_refused_when_it_is_registered():
    with pytest.raises(ScheduleError, match=r"deadlock: worker 0 waits in 0RB0(.|\n)*\[1RF0\]"):
        register_text("stuck", "0RB0 0F0 0SF0 0B0 0U\n1RF0 1F0 1B0 1SB0 1U")
