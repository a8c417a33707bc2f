"""Perfetto's trace processor imports our traces: every slice, arrow and counter, and no error."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from browsers import ask_perfetto, chromium

from hetpipe.report.intervals import pair_messages
from hetpipe.report.trace import Details, write_trace
from hetpipe.schedule import generate
from hetpipe.simulate import StageTimes, Timeline, Transfer, simulate
from hetpipe.simulate.outcome import MemoryUse

SLICES = """select process.name || ' ' || thread.name || ' ' || slice.name || ' ' || slice.dur
    from slice join thread_track on track_id = thread_track.id join thread using (utid)
    join process using (upid) where slice.name in ('0F2', '1B3')"""
ARROWS = """select sender.name || ' ' || receiver.name from flow
    join slice sender on slice_out = sender.id join slice receiver on slice_in = receiver.id"""
COUNTERS = """select name || ' ' || cast(value as int) from counter
    join counter_track on track_id = counter_track.id order by ts"""
ERRORS = "select name from stats where value > 0 and severity != 'info'"
OVERLAPS = "select name from slice where depth > 0"


def test_perfetto_imports_slices_arrows_and_counters(tmp_path: Path) -> None:
    link = Transfer(latency_s=2e-3, occupancy_s=3e-3)
    times = StageTimes((0.01,) * 2, (0.02,) * 2, (0.005,) * 2, (link,), (link,))
    predicted = simulate(generate("1f1b", 2, 4), times)
    timelines = [Timeline(predicted.workers, predicted.spans, "measured"), predicted]
    use = MemoryUse(np.array([0.0, 1e-3]), np.array([5, 7]))
    write_trace(tmp_path / "trace.json", timelines, Details(memory={"a": use}))
    with chromium() as browser:
        slices, arrows, counters, errors, overlaps = ask_perfetto(
            browser, tmp_path / "trace.json", [SLICES, ARROWS, COUNTERS, ERRORS, OVERLAPS]
        )
    assert (errors, overlaps) == ([], [])
    assert sorted(slices) == sorted(
        f"{label} {predicted.workers[worker]} {name} {dur}"
        for label in ("measured", "predicted")
        for worker, name, dur in ((0, "0F2", 10_000_000), (1, "1B3", 20_000_000))
    )
    assert sorted(arrows) == sorted(
        f"{send.action} {receive.action}"
        for timeline in timelines
        for send, receive in pair_messages(timeline.spans)
    )
    assert len(arrows) == 16
    assert counters == ["memory of a bytes 5", "memory of a bytes 7"]
