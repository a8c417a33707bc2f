"""Damaged copies of documents: text or JSON with one or a few random changes."""

from __future__ import annotations

import copy
import json
import random
import re
from typing import Any

HUGE = "@huge@"  # stands for a number that Python refuses to print
EXTREMES = [
    0, -1, 1, 2, 10**9, 2**31, 2**63, 10**30, 10**400, 0.0, -0.5, 3.5, 1e-308, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), HUGE,
]  # fmt: skip
OTHERS = [
    None, True, False, "", "x", "1", "a\nb", "\0", "\u2028", [], [[]], {}, {"x": 1}, [1, 2], [None],
]  # fmt: skip
NUMBERS = ["0", "-1", "1", "7", "999999999", "99999999999999999999", "9" * 5000, "1e999", "nan",
           "inf", "0x" + "f" * 9000, "1.5", "true", '""', "[]", "{}", "[1, [2]]"]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) below a node."""
    if isinstance(node, dict):
        inside = [(node, key) for key in node]
    elif isinstance(node, list):
        inside = [(node, index) for index in range(len(node))]
    else:
        return []
    return inside + [place for holder, key in inside for place in places(holder[key])]


def changed(document: Any, rng: random.Random) -> Any:
    """Return a copy of JSON data with one to three changes in its structure."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        below = places(document)
        if not below:
            return document
        holder, key = rng.choice(below)
        change = rng.randrange(7)
        if change == 0:
            del holder[key]
        elif change == 1 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif change == 1:
            holder[f"{key}x"] = copy.deepcopy(holder[key])
        elif change == 2:
            holder[key] = copy.deepcopy(rng.choice(OTHERS))
        elif change in (3, 4):
            holder[key] = rng.choice(EXTREMES)
        elif change == 5:
            other, there = rng.choice(below)
            if there in (other if isinstance(other, dict) else range(len(other))):
                holder[key] = copy.deepcopy(other[there])
        else:
            for _ in range(rng.choice((1, 2, 50))):
                holder[key] = [holder[key]]
    return document


def dumped(document: Any) -> bytes:
    """Return JSON, including the numbers that `json` refuses to write."""
    return json.dumps(document, indent=1).replace(json.dumps(HUGE), "9" * 5000).encode()


def spoilt(text: bytes, rng: random.Random) -> bytes:
    """Return a copy of a text with bytes, lines or words flipped, cut, doubled or replaced."""
    for _ in range(rng.choice((1, 1, 2))):
        lo, hi = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        hi = min(hi, lo + rng.choice((1, 4, 40)))
        change = rng.randrange(8)
        if change == 0 and lo < len(text):
            text = text[:lo] + bytes([text[lo] ^ 1 << rng.randrange(8)]) + text[lo + 1 :]
        elif change == 1:
            text = text[:lo] + text[hi:]
        elif change == 2:
            text = text[:hi] + text[lo:hi] + text[hi:]
        elif change == 3:
            text = text[:lo] + rng.choice((b"\xff\xfe", b"\0", b"[" * 60_000, b"#")) + text[lo:]
        elif change == 4:
            lines = text.split(b"\n")
            index = rng.randrange(len(lines))
            lines[index:index] = rng.choice(([], [lines[index]] * 2, [rng.choice(lines)]))
            del lines[index + rng.randrange(2) if index + 1 < len(lines) else index]
            text = b"\n".join(lines)
        else:
            words = list(re.finditer(rb'"[^"\n]*"|[0-9][0-9.e+-]*', text))
            if words:
                word = rng.choice(words)
                new = rng.choice((*NUMBERS, rng.choice(words)[0].decode("utf-8", "replace")))
                text = text[: word.start()] + new.encode() + text[word.end() :]
    return text
