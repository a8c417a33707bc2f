"""Invented documents: each field of a record has an allowed value, often at its limits.

Such values may contradict each other, which the readers must detect.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from damage import OTHERS, TEXTS
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

from hetpipe.records import LEAST, Entries, NullIsInfinite, Number, OneOf, Parsed, Whole

NAMES = st.sampled_from(["a", "b", "c", "fc.0", "a b", "[/x]", "é", "x" * 300]) | st.text(
    st.characters(codec="utf-8"), min_size=1, max_size=5
)
Texts = Mapping[Callable[[str], Any], SearchStrategy[str]]
"""Maps the parser of a field to texts for the field."""


def values(kind: Any, texts: Texts | None = None, *, strict: bool = False) -> SearchStrategy[Any]:
    """Draw JSON data for a type as used in records; unless `strict`, sometimes any other value."""
    return _values(kind, texts or {}, strict)


def _values(kind: Any, texts: Texts, strict: bool) -> SearchStrategy[Any]:
    if isinstance(kind, type) and is_dataclass(kind):
        return _record(kind, texts, strict)
    origin, parts = get_origin(kind), get_args(kind)
    inner = [st.none() if part is NoneType else _values(part, texts, strict)
             for part in (parts if origin in (Union, UnionType, tuple, dict) else ())
             if part is not ...]  # fmt: skip
    if origin is Annotated:
        return _annotated(parts[0], parts[1:], texts, strict)
    if origin in (Union, UnionType):
        return st.one_of(*inner)
    if origin is tuple and parts[-1] is ...:
        return st.lists(inner[0], max_size=3)
    if origin is tuple:
        return st.tuples(*inner).map(list)
    if origin is dict:
        return st.dictionaries(NAMES, inner[1], max_size=3)
    plain = {str: NAMES, bool: st.booleans(), int: st.integers(0, 9), float: st.floats(0, 1)}
    return plain.get(kind, OTHERS)


@composite
def _record(draw: DrawFn, kind: type, texts: Texts, strict: bool) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    odd = 0 if strict else draw(st.integers(0, 19))
    if odd == 19:
        return draw(OTHERS)
    record = {
        entry.name: draw(_values(hints[entry.name], texts, strict))
        for entry in fields(kind)
        if strict or draw(st.integers(0, 19)) < 19
    }
    if odd > 15 and record:
        record[draw(st.sampled_from(sorted(record)))] = draw(OTHERS)
    if odd == 15:
        record[draw(TEXTS)] = draw(OTHERS)
    return record


def _annotated(
    base: Any, limits: tuple[Any, ...], texts: Texts, strict: bool
) -> SearchStrategy[Any]:
    inner = _values(base, texts, strict)
    for limit in limits:
        if isinstance(limit, Whole):
            near = st.integers(limit.least, min(limit.least + 9, limit.most))
            inner = near | near | st.integers(limit.least, limit.most)
        elif isinstance(limit, Number):
            most = min(limit.most, max(1.0, limit.least))
            least = limit.least + LEAST * limit.above
            near = st.floats(least, most)
            whole = st.floats(least, limit.most)
            inner = near | near | whole
        elif isinstance(limit, OneOf):
            inner = st.sampled_from(limit.choices)
        elif isinstance(limit, Entries) and base is not str:
            part = get_args(base)[0 if get_origin(base) is tuple else 1]
            most = 3 if limit.most is None else limit.most
            entries = _values(part, texts, strict)
            if get_origin(base) is tuple:
                inner = st.lists(entries, min_size=limit.least, max_size=most)
            else:
                inner = st.dictionaries(NAMES, entries, min_size=limit.least, max_size=most)
        elif isinstance(limit, NullIsInfinite):
            inner = inner | inner | st.none()
        elif isinstance(limit, Parsed):
            inner = texts.get(limit.parse, TEXTS)
    return inner


def toml(document: Any) -> bytes:
    """Return a document as TOML with inline tables;

    values that TOML lacks are dropped or written nevertheless.
    """
    if not isinstance(document, dict):
        return _toml_value(document).encode("utf-8", "replace")
    rows = {_toml_text(key): value for key, value in document.items() if value is not None}
    lines = [f"{key} = {_toml_value(value)}\n" for key, value in rows.items()]
    return "".join(lines).encode("utf-8", "replace")


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        rows = [f"{_toml_text(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None]
        return "{" + ", ".join(rows) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return (
        _toml_text(value)
        if isinstance(value, str)
        else json.dumps(value).lower().replace("infinity", "inf")
    )


def _toml_text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
