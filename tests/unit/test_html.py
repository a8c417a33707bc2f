"""Notebooks show tables and pictures that no name can change into elements or scripts."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser

import pytest
from tables import make_table, plan_by

from hetpipe.cluster import Cluster, Member
from hetpipe.diagnosis.record import Diagnosis
from hetpipe.explain.explanation import explain
from hetpipe.html import MOST_BARS, Bar, bars_html, lines_html, table_html
from hetpipe.plan.pricing import predict
from hetpipe.plan.proposal import Proposal

EVIL = "<script>alert('\"&')</script>"
TAGS = {
    "table", "caption", "thead", "tbody", "tr", "th", "td", "p", "b", "svg", "rect", "text",
    "title",
}  # fmt: skip


class Elements(HTMLParser):
    """Collects elements and text, and checks that every element ends."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not [name for name, _ in attrs if name.startswith("on")]
        self.found.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def shown() -> dict[str, object]:
    table = make_table({EVIL: 3.0, "slow": 1.0})
    table = replace(
        table, model=EVIL, layers=(replace(table.layers[0], name=EVIL), *table.layers[1:])
    )
    plan = plan_by({4: table}, Proposal((3,), ((EVIL,), ("slow",)), "1f1b", 4), 16)
    return {
        "plan": plan,
        "costs": table,
        "timeline": predict(plan, table),
        "explanation": explain(plan, table),
        "cluster": Cluster((Member(EVIL, "numpy:cpu:0"), Member("b", "numpy:cpu:0"))),
        "diagnosis": Diagnosis("between", 1.0, 3, detail=EVIL),
    }


@pytest.mark.parametrize("name", shown())
def test_a_notebook_shows_it_without_scripts(name: str) -> None:
    html = shown()[name]._repr_html_()  # type: ignore[attr-defined]
    elements = Elements(html)
    assert set(elements.found) <= TAGS
    assert EVIL in elements.text
    assert len(html) < 100_000


def test_a_table_has_its_cells_in_order() -> None:
    elements = Elements(table_html("t", ("a", "b"), [("1", "<2>")], {"b"}))
    assert elements.text == "tab1<2>"
    assert elements.found.count("td") == 2


def test_a_leading_word_is_bold_only_before_a_colon() -> None:
    assert lines_html(["note: x: y", "no word: x"]) == "<p><b>note</b>: x: y</p><p>no word: x</p>"


def test_a_picture_has_a_limited_number_of_bars() -> None:
    bars = [Bar(0.0, 0.1, "0F0", "#123456")] * (2 * MOST_BARS)
    infinite = Bar(0.0, float("nan"), "0F1", "#123456")
    elements = Elements(bars_html("t", ("a", "b"), [[infinite, *bars], bars]))
    assert elements.found.count("rect") == MOST_BARS - 1


def test_a_number_and_its_unit_stay_in_one_line() -> None:
    html = table_html("t", ("name", "bytes"), [("a b", "64 KiB")], {"bytes"})
    assert html.count("white-space:nowrap") == html.count("text-align:right") == 2
