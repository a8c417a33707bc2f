"""Reads flaws of kernels from Oclgrind's log, each kind of flaw once per source line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hetpipe.sdk.kernels import Flaw

KINDS = (
    ("data race", "race"),
    ("Invalid read", "out of bounds"),
    ("Invalid write", "out of bounds"),
    ("ninitialized", "uninitialised read"),
    ("Out of bounds", "out of bounds"),
    ("divergence", "divergent barrier"),
    ("Divergence", "divergent barrier"),
)
"""Kinds of flaws, by words in the first line of a message."""
LINE = re.compile(r"^\s*At line (\d+) \(column \d+\) of [^\n]*:\n\s*([^\n]*)", re.MULTILINE)
KERNEL = re.compile(r"^\s*Kernel:\s*(\w+)", re.MULTILINE)
ITEM = re.compile(r"Global\((\d+),(\d+),(\d+)\)")


def flaws_of(log: str) -> Sequence[Flaw]:
    """Return the flaws in a log, in order."""
    flaws: dict[tuple[str, str, int | None], Flaw] = {}
    for message in _messages(log):
        first = message.partition("\n")[0].strip()
        kind = next((kind for words, kind in KINDS if words in first), None)
        if kind is None:
            continue
        kernel = KERNEL.search(message)
        places = LINE.findall(message)
        line = int(places[0][0]) if places else None
        name = kernel[1] if kernel else "?"
        flaws.setdefault((kind, name, line), Flaw(kind, name, _text(first, message, places), line))
    return list(flaws.values())


def _messages(log: str) -> Iterator[str]:
    """Yield the messages: each begins at the margin and has indented details."""
    lines: list[str] = []
    for line in log.split("\n"):
        if line[:1].strip() and lines:
            yield "\n".join(lines)
            lines = []
        lines.append(line)
    yield "\n".join(lines)


def _text(first: str, message: str, places: Sequence[tuple[str, str]]) -> str:
    """Return a message as one line: its first line, the work-items and the code."""
    items = [",".join(found) for found in ITEM.findall(message)]
    code = " and ".join(dict.fromkeys(code.strip() for _, code in places))
    who = " and ".join(dict.fromkeys(f"({item})" for item in items))
    parts = [first, f"by work-item {who}" if who else "", f"in `{code}`" if code else ""]
    return " ".join(part for part in parts if part)
