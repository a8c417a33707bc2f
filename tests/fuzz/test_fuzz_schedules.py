"""Schedules as text: errors name line or action, and a schedule that is read prints unchanged."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import spoilt
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st

from hetpipe.errors import ScheduleError
from hetpipe.schedule import fixed, generate, parse_schedule, print_schedule, rule
from hetpipe.schedule.action import Op

GENERATED = [
    print_schedule(generate("1f1b", 3, 4, tied=[(0, [2])])),
    print_schedule(generate("fbp", 2, 2)),
    print_schedule(generate("zb-h1", 2, 3)),
    "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1  # passes\n",
]
PLACE = r":\d+: |line \d+: |\d+[A-Z]{1,2}\d*|stages are \[|lane"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the schedules that cases register."""
    monkeypatch.setattr(rule, "_rules", dict(rule._rules))
    yield
    fixed._texts.pop("fuzzed", None)


def attempt(path: Path, content: bytes) -> str:
    rule._rules.pop("fuzzed", None)
    fixed._texts.pop("fuzzed", None)
    path.write_bytes(content)
    name = result_of(lambda: fixed.register_file(path), (ScheduleError,))
    if name != "fuzzed":
        assert name.startswith(f"{path}:"), name
        assert re.search(PLACE, name.removeprefix(str(path))), name
        return REFUSED
    schedule = parse_schedule(content.decode())
    assert parse_schedule(print_schedule(schedule)) == schedule
    stages, microbatches = fixed._size(schedule)
    result_of(lambda: generate("fuzzed", stages, microbatches), (ScheduleError,))
    return ACCEPTED


WORDS = st.builds(
    lambda stage, op, number: f"{stage}{op.value}{number}",
    st.integers(0, 2),
    st.sampled_from(Op),
    st.sampled_from(["0", "1", "2", "", "00", "0" * 5000, "9" * 20]),
)
HEADS = st.sampled_from(["", "", "worker 0: ", "worker 1: ", "worker 0 lane 1: ", "worker : "])


def passes(stages: int, count: int, order: list[str]) -> str:
    """Return rows of forwards and backwards in any order."""
    return "\n".join(
        " ".join(f"{stage}{word}" for word in order if int(word[1:]) < count)
        for stage in range(stages)
    )


def test_damaged(tmp_path: Path) -> None:
    files = spoilt(st.sampled_from(GENERATED).map(str.encode))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "fuzzed.txt", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    row = st.tuples(HEADS, st.lists(WORDS, max_size=8)).map(lambda r: r[0] + " ".join(r[1]))
    order = st.permutations(["F0", "B0", "F1", "B1", "F2", "B2"])
    rows = st.lists(row, max_size=4).map("\n".join)
    files = (st.builds(passes, st.integers(1, 3), st.integers(1, 3), order) | rows).map(str.encode)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "fuzzed.txt", content)))
