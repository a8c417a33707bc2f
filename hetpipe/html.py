"""HTML for notebooks and pages: tables without scripts, with every text escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape
from math import isfinite
from typing import NamedTuple


def table_html(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
) -> str:
    """Return a table; columns in `numbers` are aligned to the right, in one line."""
    styles = [
        ' style="text-align:right;white-space:nowrap"' if name in numbers else ""
        for name in columns
    ]
    head = "".join(
        f'<th scope="col"{style}>{escape(name)}</th>'
        for name, style in zip(columns, styles, strict=True)
    )
    body = "".join(f"<tr>{_cells(row, styles)}</tr>" for row in rows)
    caption = f'<caption style="text-align:left;font-weight:bold">{escape(title)}</caption>'
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cells(row: Sequence[str], styles: Sequence[str]) -> str:
    cells = zip(row, styles, strict=True)
    return "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in cells)


def lines_html(lines: Iterable[str]) -> str:
    """Return a paragraph for each line of text; the word before a first colon is bold."""
    paragraphs = []
    for line in lines:
        word, colon, text = line.partition(": ")
        lead = f"<b>{escape(word)}</b>: " if colon and " " not in word else ""
        paragraphs.append(f"<p>{lead}{escape(text if lead else line)}</p>")
    return "".join(paragraphs)


MOST_BARS = 2000
"""A picture in a notebook has at most this many bars, because a notebook stores it."""
WIDE, ROW, LEFT = 900, 22, 160  # of a picture, in pixels


class Bar(NamedTuple):
    """A bar from `lo` to `hi`, which are shares of the picture's width."""

    lo: float
    hi: float
    text: str
    colour: str


def bars_html(title: str, names: Sequence[str], rows: Sequence[Sequence[Bar]]) -> str:
    """Return rows of bars as SVG, which scales with its place. Later bars may be left out."""
    parts = []
    for number, (name, row) in enumerate(zip(names, rows, strict=True)):
        top = ROW * number
        text = f'<text x="0" y="{top + 15}" fill="currentColor">{escape(name)}</text>'
        parts.append(text)
        for bar in row[: MOST_BARS // len(names)]:
            if isfinite(bar.lo + bar.hi):
                x, width = LEFT + (WIDE - LEFT) * bar.lo, (WIDE - LEFT) * (bar.hi - bar.lo)
                parts.append(
                    f'<rect x="{x:.2f}" y="{top + 2}" width="{max(width, 0.5):.2f}" '
                    f'height="{ROW - 4}" fill="{bar.colour}"><title>{escape(bar.text)}</title>'
                    "</rect>"
                )
    return (
        f'<svg viewBox="0 0 {WIDE} {ROW * len(names)}" role="img" aria-label="{escape(title)}" '
        f'style="max-width:100%;font:12px sans-serif">{"".join(parts)}</svg>'
    )
