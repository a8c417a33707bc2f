"""Reads TOML files that people write, and finds the line of a value for error messages."""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.records import Place

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_LENGTH = 8 << 20
"""Most characters of a file: enough for 100,000 tables, which take some seconds to read."""
_NAME = r"""(?:"[^"]*"|'[^']*'|[\w-]+)"""
_NAMES = rf"\s*({_NAME}(?:\s*\.\s*{_NAME})*)\s*"
_HEADER = re.compile(rf"\s*(\[\[?){_NAMES}\]")
_SETTING = re.compile(rf"{_NAMES}=")
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:[\w"'-]+\s*\.\s*){100}""")
"""A key of more than 100 parts, which is refused: parsing takes time quadratic in the parts."""


def parse_toml(text: str, path: Path, error: type[HetpipeError]) -> dict[str, Any]:
    """Return the data in a file's text. Raises `error` with a message `path:line: fault`."""
    if len(text) > MOST_LENGTH:
        raise error(f"{path} has {len(text)} characters; at most {MOST_LENGTH} are read")
    if long_key := _LONG_KEY.search(text):
        line = text.count("\n", 0, long_key.start()) + 1
        raise error(f"{path}:{line}: a key has more than 100 parts; write tables, and short keys")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as fault:
        found = re.search(r"line (\d+)", str(fault))
        raise error(f"{path}:{found[1] if found else 1}: {fault}") from fault
    except ValueError as fault:  # a whole number too long for Python
        raise error(f"{path}:1: {fault}") from fault
    except RecursionError as fault:
        raise error(f"{path}:1: values are nested too deeply; write flatter tables") from fault


class Lines:
    """Finds the lines of a TOML text that open tables and set values."""

    def __init__(self, text: str) -> None:
        self._lines: dict[Place, int] = {}
        self._counts: Counter[Place] = Counter()  # by place: `[[ ]]` headers so far
        table: Place = ()
        for number, line in enumerate(text.split("\n"), 1):
            if header := _HEADER.match(line):
                table = self._opened(_names(header[2]), repeated=header[1] == "[[")
                self._note(table, number)
            elif setting := _SETTING.match(line):
                self._note((*table, *_names(setting[1])), number)

    def at(self, place: Place) -> int:
        """Return the line of the value at a place, or of the nearest table around it, or else 1."""
        for end in range(len(place), 0, -1):
            if place[:end] in self._lines:
                return self._lines[place[:end]]
        return 1

    def _note(self, place: Place, number: int) -> None:
        for end in range(1, len(place) + 1):
            self._lines.setdefault(place[:end], number)

    def _opened(self, names: list[str], repeated: bool) -> Place:
        """Return the place of a header's table; a name of `[[ ]]` tables means the last one."""
        place: Place = ()
        for name in names[:-1]:
            place = (*place, name)
            if count := self._counts[place]:
                place = (*place, count - 1)
        place = (*place, names[-1])
        if not repeated:
            return place
        self._counts[place] += 1
        return (*place, self._counts[place] - 1)


def _names(text: str) -> list[str]:
    """Split a key: `a."b.c"` -> `["a", "b.c"]`."""
    return [name.strip("\"'") for name in re.findall(_NAME, text)]
