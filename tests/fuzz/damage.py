"""Damaged copies of valid files: changed bytes and lines of text, changed parts of JSON."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

HUGE = "@huge@"  # stands for a number that Python refuses to print
NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 7, 10**9, 2**31, 2**63 - 1, 2**63, 10**30, 10**400, 0.0, -0.0, -0.5, 1.0, 3.5,
     5e-324, 1e-308, 1e300, 1.7e308, float("nan"), float("inf"), float("-inf"), HUGE]
)  # fmt: skip
TEXTS = st.sampled_from(
    ["", " ", "x", "1", "a\nb", "\0", "\x1b[2J", "\x7f", "\u2028", "\u202e", "\ud800", "😀", "[/x]",
     "[bold]", "\\", '"', "'", "../x", "%s", "{0}", "a.b", "=", "#", "x" * 100_000]
) | st.text(max_size=6)  # fmt: skip
OTHERS = (
    st.none() | st.booleans() | NUMBERS | TEXTS
    | st.sampled_from([[], [[]], {}, {"x": 1}, {"": None}, [1, 2], [None], ["x"] * 2000])
)  # fmt: skip
WORDS = st.sampled_from(
    [b"0", b"-1", b"1", b"-0", b"007", b"999999999", b"9" * 20, b"9" * 5000, b"1e400", b"1e999",
     b"1_000", b"-1e-400", b"nan", b"-inf", b"0x" + b"f" * 9000, b"1.5", b"true", b"null", b'""',
     b"[]", b"{}", b"[1, [2]]", b'"\\ud800"', b'"\\u0000"', b'"' + b"x" * 50_000 + b'"', b"'",
     b"1979-05-27", b"0e999999999", b"1E-999999999"]
)  # fmt: skip
ADDED = st.sampled_from(
    [b"\xff\xfe", b"\0", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n\n", b"#", b"[" * 60_000,
     b'{"a":' * 60_000, b"[[a]]\n" * 200, b"x." * 30_000, b" " * 100_000, b"x" * 100_000,
     b'"""', b"'''", b"\\", b"0F0 " * 2000]
) | st.binary(max_size=4)  # fmt: skip
MOST_PLACES = 3000


@composite
def spoilt(draw: DrawFn, contents: SearchStrategy[bytes]) -> bytes:
    """Draw text with some bytes, lines or words flipped, cut, doubled, moved or replaced."""
    text = draw(contents)
    for _ in range(draw(st.integers(1, 3))):
        lo = draw(st.integers(0, len(text)))
        hi = min(len(text), lo + draw(st.sampled_from([1, 2, 4, 40, 400])))
        change = draw(st.integers(0, 8))
        if change == 0 and lo < len(text):
            bit = 1 << draw(st.integers(0, 7))
            text = text[:lo] + bytes([text[lo] ^ bit]) + text[lo + 1 :]
        elif change == 1:
            text = text[:lo] + text[hi:]
        elif change == 2:
            text = text[:lo]
        elif change == 3:
            text = text[:lo] + draw(ADDED) + text[lo:]
        elif change in (4, 5):
            text = _other_lines(draw, text)
        else:
            text = _other_word(draw, text)
    return text


def _other_lines(draw: DrawFn, text: bytes) -> bytes:
    lines = text.split(b"\n")
    one, other = (draw(st.integers(0, len(lines) - 1)) for _ in range(2))
    change = draw(st.integers(0, 3))
    if change == 0:
        lines[one], lines[other] = lines[other], lines[one]
    elif change == 1:
        lines[one:one] = [lines[other]] * draw(st.sampled_from([1, 2, 500]))
    elif change == 2:
        del lines[one]
    else:
        lines[one] = lines[other]
    return b"\n".join(lines)


def _other_word(draw: DrawFn, text: bytes) -> bytes:
    words = list(re.finditer(rb'"[^"\n]*"|[0-9][0-9.e+-]*|\w+', text))
    if not words:
        return text
    word = draw(st.sampled_from(words))
    new = draw(WORDS | st.sampled_from(words).map(lambda other: other[0]))
    return text[: word.start()] + new + text[word.end() :]


@composite
def changed(draw: DrawFn, documents: SearchStrategy[Any]) -> Any:
    """Draw JSON data with keys or entries dropped, renamed, doubled, copied, nested or replaced."""
    document = copy.deepcopy(draw(documents))
    for _ in range(draw(st.integers(1, 3))):
        below = places(document)
        if not below:
            return document
        holder, key = draw(st.sampled_from(below))
        change = draw(st.integers(0, 6))
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            copies = draw(st.sampled_from([1, 3, 300]))
            if len(below) > MOST_PLACES:
                copies = 1  # copies of copies of copies would fill the memory
            holder[key:key] = [copy.deepcopy(holder[key])] * copies
        elif change == 1:
            holder[draw(TEXTS)] = holder.pop(key)
        elif change in (2, 3):
            holder[key] = draw(NUMBERS)
        elif change == 4:
            holder[key] = copy.deepcopy(draw(OTHERS))
        elif change == 5:
            other, there = draw(st.sampled_from(below))
            if there in (other if isinstance(other, dict) else range(len(other))):
                holder[key] = copy.deepcopy(other[there])
        else:
            for _ in range(draw(st.sampled_from([1, 2, 200]))):
                holder[key] = [holder[key]]
    return document


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) below a node."""
    if isinstance(node, dict):
        inside = [(node, key) for key in node]
    elif isinstance(node, list):
        inside = [(node, index) for index in range(len(node))]
    else:
        return []
    return inside + [place for holder, key in inside for place in places(holder[key])]


def dumped(document: Any) -> bytes:
    """Return JSON, including numbers that `json` refuses to write."""
    return json.dumps(document, indent=1).replace(json.dumps(HUGE), "9" * 5000).encode()


def damaged_json(documents: SearchStrategy[Any]) -> SearchStrategy[bytes]:
    """Damage documents in their structure or as text."""
    structure = changed(documents).map(dumped)
    return structure | structure | spoilt(documents.map(dumped))
