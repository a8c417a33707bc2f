"""Pictures and traces of timelines, without a device: the intervals they show, and their places."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from rich.console import Console

from hetpipe.report import write_trace
from hetpipe.report.intervals import PASSES, Kind, intervals
from hetpipe.report.picture import COLOURS, figure_of
from hetpipe.report.tables import Table
from hetpipe.report.trace import Details
from hetpipe.schedule import generate
from hetpipe.schedule.action import Action
from hetpipe.schedule.lanes import HAND_OVERS
from hetpipe.simulate import Span, StageTimes, Timeline, Transfer, simulate
from hetpipe.simulate.outcome import MemoryUse

LINK = Transfer(latency_s=2e-3, occupancy_s=3e-3)


def times(stages: int) -> StageTimes:
    links = (LINK,) * (stages - 1)
    return StageTimes(
        (10e-3,) * stages, (20e-3,) * stages, (5e-3,) * stages, links, links,
        all_reduce_s=(8e-3,) * stages,
    )  # fmt: skip


def predict(name: str) -> Timeline:
    stages = {"zb-v": 4}.get(name, 2)
    workers = {"zb-v": 2, "data-parallel": 1}.get(name, stages)
    replicas = [2, 2] if name == "data-parallel" else ()
    schedule = generate(name, stages, 4, workers=workers, replicas=replicas)
    return simulate(schedule, times(stages))


def measured(timeline: Timeline, copy_s: float = 1e-3) -> Timeline:
    """Return the timeline as workers would record it.

    A receive begins when its message has arrived, and copies it; a send ends when the message
    has left; hand-overs within a worker have no spans.
    """
    came_s = {s.action.message: s.end_s for s in timeline.spans if s.action.op.is_send}
    spans = []
    for span in (span for span in timeline.spans if span.action.op not in HAND_OVERS):
        if span.action.op.is_send:
            span = Span(span.worker, span.action, span.start_s, span.end_s - LINK.latency_s)
        elif span.action.op.is_receive:
            free_s = max(
                (s.end_s for s in timeline.spans
                 if s.worker == span.worker and s.action.op.is_compute and s.end_s <= span.end_s),
                default=0.0,
            )  # fmt: skip
            end_s = max(came_s[span.action.message], free_s)
            span = Span(span.worker, span.action, end_s - copy_s, end_s)
        spans.append(span)
    return Timeline(timeline.workers, tuple(spans), "measured")


def text(texts: str, worker: int = 0) -> tuple[Span, ...]:
    """Return the spans of a text such as `2F0 1 3`, in seconds."""
    parts = texts.split()
    rows = zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    return tuple(Span(worker, Action.parse(a), float(lo), float(hi)) for a, lo, hi in rows)


def find_intervals(timeline: Timeline, kind: Kind, worker: int) -> list[tuple[str, float, float]]:
    return [
        (str(each.action), each.start_s, each.end_s)
        for each in intervals(timeline)
        if each.kind is kind and each.worker == worker
    ]


def labels(axes: Axes) -> dict[str, list[PolyCollection]]:
    bars = defaultdict(list)
    for artist in axes.collections:
        assert isinstance(artist, PolyCollection)
        bars[str(artist.get_label())].append(artist)
    return bars


KINDS = {
    "1f1b": {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.TRANSFER, Kind.WAIT},
    "zb-h1": {*Kind} - {Kind.BACKWARD, Kind.SUM, Kind.LOSS},
    "zb-v": {*Kind} - {Kind.BACKWARD, Kind.SUM, Kind.LOSS},
    "fbp": {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.TRANSFER, Kind.WAIT},
    "data-parallel": {Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE, Kind.SUM},
}


@pytest.mark.parametrize("name", KINDS)
def test_every_pass_transfer_sum_and_wait_is_drawn(name: str) -> None:
    timeline = predict(name)
    figure = figure_of([[timeline]], name)
    drawn = labels(figure.axes[0])
    assert set(drawn) == {kind.value for kind in KINDS[name]}
    for op, kind in PASSES.items():
        spans = [span for span in timeline.spans if span.action.op is op]
        assert sum(len(bar.get_paths()) for bar in drawn.get(kind.value, [])) == len(spans)
    legend = {text.get_text() for text in figure.legends[0].get_texts()}
    assert legend == set(drawn)
    assert len(set(COLOURS.values())) == len(Kind)


def test_panels_of_a_workload_share_a_time_axis_and_workloads_do_not() -> None:
    long, short = predict("zb-v"), predict("1f1b")
    axes = figure_of([[long, short], [short]]).axes
    ends = [each.get_xlim()[1] for each in axes]
    assert ends == pytest.approx([long.step_s * 1e3, long.step_s * 1e3, short.step_s * 1e3])
    assert axes[0].get_shared_x_axes().joined(axes[0], axes[1])
    assert not axes[0].get_shared_x_axes().joined(axes[0], axes[2])


def test_a_predicted_receive_is_a_wait_until_its_message_leaves() -> None:
    """Worker 1 asks for the message at 0; it leaves at 10 ms and arrives at 15 ms."""
    timeline = predict("1f1b")
    assert find_intervals(timeline, Kind.WAIT, 1)[0] == pytest.approx(("1F0", 0.0, 10e-3))
    assert find_intervals(timeline, Kind.TRANSFER, 1)[0] == pytest.approx(("1RF0", 10e-3, 15e-3))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "zb-v", "fbp"])
def test_measured_and_predicted_waits_agree(name: str) -> None:
    """Waits agree exactly. A measured transfer lacks its latency if no worker waits for it."""
    timeline = predict(name)
    for worker in range(len(timeline.workers)):
        waits = find_intervals(measured(timeline), Kind.WAIT, worker)
        for one, other in zip(waits, find_intervals(timeline, Kind.WAIT, worker), strict=True):
            assert one == pytest.approx(other)


def test_a_waiting_message_is_no_transfer() -> None:
    """The message waits from 2 to 5 s while its receiver computes, which then copies it."""
    spans = text("0SF0 1 2") + text("1B9 0 5 1RF0 5 6 1F0 6 8", worker=1)
    timeline = Timeline(("a", "b"), spans, "measured")
    assert find_intervals(timeline, Kind.TRANSFER, 1) == [("1RF0", 1.0, 2.0), ("1RF0", 5.0, 6.0)]
    assert find_intervals(timeline, Kind.WAIT, 1) == []


def test_a_latency_with_a_waiting_lane_is_a_transfer() -> None:
    """The message leaves from 1 to 2 s and arrives at 4 s."""
    spans = text("0SF0 1 2") + text("1RF0 4 5 1F0 5 6", worker=1)
    timeline = Timeline(("a", "b"), spans, "measured")
    assert find_intervals(timeline, Kind.TRANSFER, 1) == [("1RF0", 1.0, 5.0)]


def test_a_message_for_later_does_not_end_a_wait() -> None:
    spans = text("0SF1 1 3") + text("1F0 0 1 1RF1 3 4 1B0 5 6 1F1 6 7", worker=1)
    timeline = Timeline(("a", "b"), spans, "measured")
    assert find_intervals(timeline, Kind.WAIT, 1) == [("1B0", 1.0, 5.0)]


def test_a_sum_begins_with_the_last_replica_after_a_wait() -> None:
    early = text("0B0 0 1 0A 1 6 0U 6 7")
    late = text("0B0 0 4 0A 4 6 0A 4.5 5 0U 6 7", worker=1)  # with a message of the sum
    timeline = Timeline(("a", "b"), early + late, "measured")
    for worker in (0, 1):
        assert find_intervals(timeline, Kind.SUM, worker) == [("0A", 4.0, 6.0)]
    assert find_intervals(timeline, Kind.WAIT, 0) == [("0U", 1.0, 4.0)]
    assert find_intervals(timeline, Kind.WAIT, 1) == []


def events_of(path: Path, timelines: list[Timeline]) -> list[dict[str, Any]]:
    write_trace(path, timelines)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left beside it"
    return events


CATEGORY = {
    "F": "forward", "B": "backward", "I": "backward", "W": "backward", "U": "update", "A": "sum",
}  # fmt: skip


@pytest.mark.parametrize("name", KINDS)
def test_a_trace_has_every_span_with_its_times(name: str, tmp_path: Path) -> None:
    timeline = predict(name)
    events = events_of(tmp_path / "deep" / "trace.json", [timeline])
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    shown = {
        (threads[e["tid"]].removesuffix(" +"), e["name"], e["cat"], e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["ph"] == "X" and e["cat"] != "wait"
    }
    leaves_s = {s.action.message: s.start_s for s in timeline.spans if s.action.op.is_send}
    for span in timeline.spans:
        start_s = span.start_s
        if span.action.op.is_receive:
            start_s = max(start_s, min(leaves_s[span.action.message], span.end_s))
        category = CATEGORY.get(span.action.op.value, "transfer")
        member = timeline.workers[span.worker]
        assert (member, str(span.action), category) in {each[:3] for each in shown}
        assert any(
            each[:3] == (member, str(span.action), category)
            and each[3:] == pytest.approx((start_s * 1e6, span.end_s * 1e6), abs=0.01)
            for each in shown
        ), str(span)
    assert len(shown) == len(timeline.spans)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "fbp"])
def test_arrows_of_a_trace_go_from_sends_to_their_receives(name: str, tmp_path: Path) -> None:
    timelines = [measured(predict(name)), predict(name)]
    events = events_of(tmp_path / "trace.json", timelines)
    at = {
        (e["pid"], e["tid"], e["ts"]): Action.parse(e["name"])
        for e in events
        if e["ph"] == "X" and e["cat"] == "transfer"
    }
    ends: dict[str, dict[str, Action]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = at[event["pid"], event["tid"], event["ts"]]
    assert len(ends) == sum(s.action.op.is_receive for t in timelines for s in t.spans)
    for arrow in ends.values():
        assert arrow["s"].op.is_send
        assert arrow["f"].op.is_receive
        assert arrow["s"].message == arrow["f"].message


def test_a_trace_has_a_process_per_timeline_and_no_overlap_on_a_thread(tmp_path: Path) -> None:
    timelines = [measured(predict("zb-h1")), predict("zb-h1")]
    events = events_of(tmp_path / "trace.json", timelines)
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["measured", "predicted"]
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            ends = event["ts"], event["ts"] + event["dur"]
            threads[event["pid"], event["tid"]].append(ends)
    for spans in threads.values():
        spans.sort()
        assert all(one[1] <= two[0] + 0.01 for one, two in pairwise(spans))


REQUIRED = {
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"}, "M": {"name", "pid", "tid", "args"},
    "s": {"id", "name", "cat", "pid", "tid", "ts"}, "C": {"name", "pid", "tid", "ts", "args"},
    "f": {"id", "name", "cat", "pid", "tid", "ts", "bp"},
}  # fmt: skip
"""The fields of each phase in "Trace Event Format"."""


def test_events_have_the_fields_of_the_format_and_their_arguments(tmp_path: Path) -> None:
    use = MemoryUse(np.array([0.0, 1.0]), np.array([5, 7]))
    details = Details(["layers 0 to 2", "layer 3"], [96], {"worker 0": use})
    write_trace(tmp_path / "trace.json", [measured(predict("1f1b")), predict("1f1b")], details)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for event in events:
        assert event.keys() - {"ph"} == REQUIRED[event["ph"]]
        assert all(isinstance(event.get(key, 0), int) for key in ("pid", "tid"))
        assert all(0 <= event.get(key, 0) < 1e15 for key in ("ts", "dur"))
    at = {event["name"]: event["args"] for event in events if event["ph"] == "X"}
    assert at["1F0"] == {"stage": 1, "layers": "layer 3", "micro-batch": 0}
    for name, stage in {"0SF1": 0, "1RF1": 1, "1SB1": 1, "0RB1": 0}.items():
        assert at[name]["bytes"] == 96
        assert at[name]["stage"] == stage
        assert at[name]["micro-batch"] == 1
    assert "micro-batch" not in at["0U"]
    counters = [event for event in events if event["ph"] == "C"]
    assert [each["args"]["bytes"] for each in counters] == [5, 7]
    assert {each["pid"] for each in counters} == {2}, "only the predicted timeline has memory"


def test_an_empty_timeline_has_no_intervals() -> None:
    assert intervals(Timeline(("a",), (), "measured")) == []
    assert figure_of([[Timeline(("a",), (), "measured")]]).axes[0].collections[:] == []


def test_names_in_tables_are_no_emoji_and_no_markup() -> None:
    table = Table("a :factory: [b]", ["cell", ":bug:"])
    table.add_row(":rocket:", "[red]x[/red]")
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table)
    for name in ("a :factory: [b]", ":bug:", ":rocket:", "[red]x[/red]"):
        assert name in capture.get()
