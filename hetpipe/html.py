"""HTML for notebooks and pages: tables without scripts, with every text escaped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape


def table_html(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: Collection[str] = (),
) -> str:
    """Return a table; columns in `numbers` are aligned to the right."""
    styles = [' style="text-align:right"' if name in numbers else "" for name in columns]
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
