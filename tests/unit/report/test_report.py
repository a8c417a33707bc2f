"""Tables, pictures and files, without a device."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import pytest

from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost
from hetpipe.errors import CostError, HetpipeError
from hetpipe.files import dump_json, write_beside, write_json
from hetpipe.report import draw_timelines, write_trace
from hetpipe.report.tables import Table, cost_table, link_table
from hetpipe.schedule.action import Action
from hetpipe.simulate.timeline import Span, Timeline
from hetpipe.words import format_nbytes, format_rate, format_s

INF = float("inf")


@pytest.fixture
def costs() -> CostTable:
    layers = tuple(LayerBytes(name, 4096, 0, 2048, 1024) for name in ("conv", "head"))
    fast = DeviceCost((LayerCost(1e-3, 2e-3, 0.0), LayerCost(1e-3, 2e-3, 0.0)), 0.0, 1, "host")
    slow = DeviceCost(
        (LayerCost(2e-3, 4e-3, 0.0), LayerCost(INF, INF, INF, reason="no [softmax]")),
        0.0, 1, "host", label="emulated",
    )  # fmt: skip
    link = LinkCost(1e-4, 1e9)
    return CostTable("m", 8, layers, {"a": fast, "b": slow}, {("a", "b"): link})


def timeline(label: str) -> Timeline:
    spans = []
    for worker in (0, 1):
        for number, text in enumerate(("F0", "F1", "B0", "B1", "U")):
            action = Action.parse(f"{worker}{text}")
            spans.append(
                Span(worker, action, (number + worker) * 1e-3, (number + worker + 1) * 1e-3)
            )
    spans.append(Span(0, Action.parse("0SF0"), 1e-3, 1.2e-3))
    return Timeline(("torch", "opencl"), tuple(spans), label)


def render(table: object, width: int = 160) -> str:
    from rich.console import Console

    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(table)
    return capture.get()


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(2.0, "2 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"), (0.0, "0 us"), (INF, "-")],
)
def test_seconds(time_s: float, text: str) -> None:
    assert format_s(time_s) == text


def test_bytes_and_rates() -> None:
    assert [format_nbytes(n) for n in (12, 1536, 3 << 20)] == ["12 B", "1.5 KiB", "3 MiB"]
    assert [format_rate(r) for r in (1234.4, 12.34)] == ["1234/s", "12.3/s"]


def test_cost_table_shows_times_labels_and_reasons(costs: CostTable) -> None:
    text = render(cost_table(costs))
    assert "a, measured" in text
    assert "b, emulated" in text
    assert "1 ms + 2 ms" in text
    assert "no [softmax]" in text, "a reason with brackets is no markup"


def test_link_table_prices_the_largest_cut(costs: CostTable) -> None:
    text = render(link_table(costs))
    assert "954 MiB/s" in text
    assert "101 us" in text


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_picture_of_measured_above_predicted(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / "deep" / f"steps{suffix}"
    draw_timelines(path, [timeline("measured"), timeline("predicted")], "digits")
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
    else:
        assert content.index(b"measured: 6.0 ms") < content.index(b"predicted: 6.0 ms")
    assert [p.name for p in path.parent.iterdir()] == [path.name], "nothing is left beside it"


def test_picture_refuses_unknown_formats(tmp_path: Path) -> None:
    with pytest.raises(HetpipeError, match=r"\.png.*'steps\.bmp'"):
        draw_timelines(tmp_path / "steps.bmp", [timeline("measured")])


def test_json_is_whole_and_strict(tmp_path: Path) -> None:
    path = tmp_path / "out" / "x.json"
    write_json(path, {"rate": INF, "rows": (1, 2)})
    assert json.loads(path.read_text()) == {"rate": None, "rows": [1, 2]}
    assert dump_json([]) == "[]\n"


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("old")

    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(HetpipeError, match="No space left"):
        write_beside(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_of_an_excessive_time_is_refused(tmp_path: Path) -> None:
    endless = replace(timeline("a"), spans=(Span(0, Action.parse("0F0"), 0.0, 1e305),))
    with pytest.raises(CostError, match=r"ends at 1e\+305 s, .* check the costs"):
        write_trace(tmp_path / "trace.json", [endless])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [40, 80, 400])
def test_tables_break_no_word_and_begin_each_part_with_the_keys(width: int) -> None:
    heads = ["device", "reason", *(f"opencl:emulator:{n}" for n in range(4))]
    table = Table("Times", heads, heads[2:])
    for device in ("opencl:pocl:0", "numpy:cpu:0"):
        table.add_row(device, "the least words are here", *["1.23 ms"] * 4)
    table.add_section()
    table.add_row("all")
    text = render(table, width)
    lines = text.splitlines()[1:]
    assert max(map(len, lines)) <= width
    assert set(heads) <= set(text.split())
    parts = text.count("┏")
    assert parts == {40: 5, 80: 2, 400: 1}[width]
    assert text.split().count("opencl:pocl:0") == parts
    assert text.count("1.23 ms") == 8, "a number and its unit share a line"
