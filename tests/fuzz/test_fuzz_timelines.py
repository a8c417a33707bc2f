"""Timelines in files: errors name the place, and one that is read can be measured and drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from damage import changed, damaged_json, dumped
from documents import IN_JSON, TIMELINE
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import values

from hetpipe.errors import ScheduleError
from hetpipe.records import read_json
from hetpipe.report.trace import write_trace
from hetpipe.schedule.action import Action, Op
from hetpipe.simulate.timeline import VERSION, Timeline, _Timeline

ACTIONS = st.builds(
    lambda stage, op, number: f"{stage}{op.value}{number}",
    st.integers(0, 3),
    st.sampled_from(Op),
    st.sampled_from(["", "0", "1", "2", "007", "999999999"]),
)
TEXTS = {Action.parse: ACTIONS}


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    read = lambda: Timeline.from_json(read_json(path, ScheduleError), str(path))  # noqa: E731
    timeline = result_of(read, (ScheduleError,))
    if isinstance(timeline, str):
        assert re.search(IN_JSON, timeline.removeprefix(str(path))), timeline
        return REFUSED
    assert Timeline.from_json(json.loads(json.dumps(timeline.to_json()))) == timeline
    if len(timeline.spans) < 100:
        result_of(lambda: (timeline.total_s, timeline.busy_share(), timeline.under_way_s()), ())
        result_of(lambda: write_trace(path, [timeline]), ())
        json.loads(path.read_text())
    return ACCEPTED


def fitted(timeline: dict[str, Any]) -> dict[str, Any]:
    """Return spans of existing workers that end after they begin."""
    timeline["workers"] = ["a", *timeline["workers"]]
    timeline["spans"] = [
        [span[0] % len(timeline["workers"]), span[1], *sorted(span[2:])]
        for span in timeline["spans"]
    ]
    return timeline | {"version": VERSION}


def test_damaged(tmp_path: Path) -> None:
    files = damaged_json(st.just(TIMELINE))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "t.json", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    whole = values(_Timeline, TEXTS, strict=True).map(fitted)
    files = (whole | changed(whole) | values(_Timeline, TEXTS)).map(dumped)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "t.json", content)))
