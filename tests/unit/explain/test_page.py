"""The page of an explanation: complete, offline, escaped, and never half written."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tables import make_table, plan_by

from hetpipe.errors import HetpipeError
from hetpipe.explain import page
from hetpipe.explain.explanation import Explanation, Measured, explain
from hetpipe.plan.proposal import Proposal

EVIL = "</script><img src=x onerror=alert(1)>"


def explanation_of(names: tuple[str, str] = ("fast", "slow"), layer: str = "l0") -> Explanation:
    table = make_table(dict(zip(names, (3.0, 1.0), strict=True)))
    first = replace(table.layers[0], name=layer)
    table = replace(table, layers=(first, *table.layers[1:]))
    plan = plan_by({4: table}, Proposal((3,), tuple((n,) for n in names), "1f1b", 4), 16)
    timeline = explain(plan, table).timelines["predicted"]
    losses = [(0, 2.0), (1, 1.0), (2, float("inf")), (3, 0.5)]
    measured = Measured(replace(timeline, label="measured"), timeline.total_s, (1, 2), losses)
    return explain(plan, table, measured=measured)


def data_of(text: str) -> dict[str, list[dict[str, object]]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    data: dict[str, list[dict[str, object]]] = json.loads(found[1])
    return data


def test_the_page_has_every_bar_and_asks_for_nothing(tmp_path: Path) -> None:
    explanation = explanation_of()
    path = tmp_path / "new" / "report.html"
    explanation.to_html(path)
    text = path.read_text(encoding="utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
    assert path.stat().st_size < 3_000_000
    assert not re.search(
        r"""(src|href)=["'](?!data:)|https?://(?!www\.w3\.org)|@import|url\(""", text
    )
    data = data_of(text)
    assert [device["name"] for device in data["devices"]] == ["fast", "slow"]
    for device in data["devices"]:
        measured, predicted = device["rows"]  # type: ignore[misc]
        assert measured["bars"] == predicted["bars"] != []
        assert device["memory"]["peak"] > 0  # type: ignore[index]
    assert "<caption" in text
    assert "prefers-color-scheme: dark" in text
    assert "The loss was 2 in mini-batch 0 and 0.5 in mini-batch 3" in text


def test_names_cannot_become_elements() -> None:
    text = explanation_of((EVIL, "<b>"), EVIL).page().text()
    assert EVIL not in text
    assert "<b>:" not in text
    assert data_of(text)["devices"][0]["name"] == EVIL


def test_a_command_with_undecodable_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "\udcff"])
    explanation_of().to_html(tmp_path / "page.html")
    assert "train.py" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_long_timeline_ends_earlier_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "MOST_BARS", 10)
    text = explanation_of().page().text()
    counts = [len(row["bars"]) for d in data_of(text)["devices"] for row in d["rows"]]  # type: ignore
    assert sum(counts) == 20
    assert re.search(r"\d+ later bars are left out", text)


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "page.html").mkdir()
    with pytest.raises(HetpipeError, match="cannot write"):
        explanation_of().to_html(tmp_path / "page.html")
