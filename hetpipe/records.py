"""Records: dataclasses that hold the data of files which people and programs write.

A record is frozen. The types of its fields say which values are allowed, for instance
`Annotated[int, Whole(1)]`. `Source.record` makes a record from the data of JSON or TOML: pydantic
checks them, and an error names the place. A record made in Python is not checked. Reading the first
file imports pydantic.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from hetpipe.errors import HetpipeError
from hetpipe.files import MOST_NBYTES, read_bytes, user_path
from hetpipe.words import choices, short, word

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema, ErrorDetails

T = TypeVar("T")
Place = tuple[int | str, ...]
"""Keys and indices from the top of a file down to a value."""

MOST_DIGITS = 40  # of a whole number in a JSON file
LEAST, MOST = 1e-15, 1e30
"""Bounds of measured and published numbers, in any unit."""


@dataclass(frozen=True)
class Whole:
    """Allows whole numbers from `least` to `most`, but neither True nor 1.0."""

    least: int = 0
    most: int = 2**63 - 1

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import int_schema

        return int_schema(strict=True, ge=self.least, le=self.most)


@dataclass(frozen=True)
class Number:
    """Allows finite numbers from `least` to `most`; with `above`, only numbers above `least`.

    With `above` and default limits, products and quotients of two numbers stay finite and above 0.
    """

    least: float = 0.0
    most: float = MOST
    above: bool = False

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import chain_schema, float_schema

        if not self.above:
            return float_schema(strict=True, allow_inf_nan=False, ge=self.least, le=self.most)
        above = float_schema(strict=True, allow_inf_nan=False, gt=self.least, le=self.most)
        return chain_schema([above, float_schema(ge=self.least + LEAST)])


@dataclass(frozen=True)
class OneOf:
    """Allows the texts in `choices`."""

    choices: tuple[str, ...]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import literal_schema

        return literal_schema(list(self.choices))


@dataclass(frozen=True)
class Entries:
    """Allows lists of `least` to `most` entries, and texts of as many characters."""

    least: int = 1
    most: int | None = None

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        most = {} if self.most is None else {"max_length": self.most}
        return cast("CoreSchema", {**handler(kind), "min_length": self.least, **most})


@dataclass(frozen=True)
class NullIsInfinite:
    """Allows null, which stands for infinity in JSON."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_wrap_validator_function

        def read(value: Any, inner: Callable[[Any], Any]) -> Any:
            return float("inf") if value is None else inner(value)

        return no_info_wrap_validator_function(read, handler(kind))


@dataclass(frozen=True)
class Parsed:
    """Allows a text from which `parse` can make the value."""

    parse: Callable[[str], Any]

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_wrap_validator_function, str_schema

        def read(value: Any, inner: Callable[[Any], Any]) -> Any:
            return with_place(lambda: self.parse(inner(value)))

        return no_info_wrap_validator_function(read, str_schema(strict=True))


@dataclass(frozen=True)
class Placed:
    """Adds the place to a `HetpipeError` that a record's `__post_init__` raises."""

    def __get_pydantic_core_schema__(self, kind: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core.core_schema import no_info_wrap_validator_function

        return no_info_wrap_validator_function(
            lambda value, inner: with_place(lambda: inner(value)), handler(kind)
        )


Count = Annotated[int, Whole()]
Positive = Annotated[int, Whole(1)]
Seconds = Annotated[float, Number(most=1e9)]
Name = Annotated[str, Entries(1)]


@dataclass(frozen=True)
class Source:
    """A document, from a file or from memory. Every fault in it raises `error`."""

    title: str  # such as "the plan"
    error: type[HetpipeError]
    where: str | Callable[[Place], str] = ""  # the file, or a function from place to file and line
    cures: Mapping[str, str] = field(default_factory=dict)  # by place without indices, "stages.hi"

    def fault(self, place: Place, why: str, key: str | int = "") -> HetpipeError:
        """Return the error for a value at a place, such as `plan.json: stages.1.hi is 3, ...`.

        With `key`, the message has the line of this key inside the value.
        """
        subject = ".".join(map(word, place)) if place else self.title
        return self._error((*place, key) if key else place, f"{subject} {why}")

    def _error(self, place: Place, sentence: str) -> HetpipeError:
        where = self.where if isinstance(self.where, str) else self.where(place)
        prefix = where or ("" if sentence.startswith(self.title) else self.title)
        return self.error(f"{prefix}: {sentence}" if prefix else sentence)

    def record(self, kind: type[T], data: object) -> T:
        """Check plain data and return a record. Raises `error` for the first fault."""
        from pydantic import ValidationError

        try:
            return cast(T, _adapter(cast(Any, kind)).validate_python([data])[0])
        except ValidationError as invalid:
            raise self._refusal(kind, invalid.errors(include_url=False)[0]) from None
        except HetpipeError as refused:  # from the record's own checks
            raise self._error((), str(refused)) from refused

    def versioned(self, kind: type[T], data: object, version: int) -> T:
        """Check data that hetpipe has written, and return a record.

        Raises `error` for another version, and for a missing key, even if the key has a default.
        """
        if not isinstance(data, Mapping):
            raise self.fault((), f"is {short(data)}, it should be an object")
        there = data.get("version")
        if type(there) is not int or there != version:
            why = f"has version {short(there)}, this hetpipe reads {version}"
            raise self.fault((), f"{why}; make it again, or install a version that reads it")
        plain = {key: data[key] for key in data if key != "version"}
        record = self.record(kind, plain)
        for place, key in _left_out(kind, plain, ()):
            raise self.fault(place, f"lacks the key {key!r}")
        return record

    def _refusal(self, kind: type, detail: ErrorDetails) -> HetpipeError:
        place: Place = detail["loc"][1:]
        if detail["type"] == "refused":
            return self._error(place, f"{'.'.join(map(word, place))}: {detail['msg']}")
        cure = self.cures.get(".".join(part for part in place if isinstance(part, str)))
        end = f"; {cure}" if cure else ""
        if detail["type"] == "missing" and isinstance(place[-1], str):
            return self.fault(place[:-1], f"lacks the key {place[-1]!r}{end}", place[-1])
        if detail["type"] == "missing":
            return self.fault(place[:-1], f"is {short(detail['input'])}: entries are missing")
        if detail["type"] == "unexpected_keyword_argument":
            keys = choices(str(place[-1]), _keys(kind, place[:-1]))
            why = f"has an unknown key {short(place[-1])}; {keys}"
            return self.fault(place[:-1], why, place[-1])
        allowed = f"it should be {_allowed(detail)}{end}"
        return self.fault(place, f"is {short(detail['input'])}, {allowed}")


def read_text(path: Path, error: type[HetpipeError]) -> str:
    """Return a file's text, without a byte order mark; `~` in the path is the home folder.

    Raises `error` if the file cannot be read, and, with the line, if it is not UTF-8.
    """
    raw = read_file(path, error)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as failure:
        line = raw.count(b"\n", 0, failure.start) + 1
        byte = raw[failure.start]
        why = f"byte {byte:#04x} is not UTF-8; save the file as text in UTF-8"
        raise error(f"{path}:{line}: {why}") from failure


def read_file(
    path: Path, error: type[HetpipeError], most_nbytes: int | None = MOST_NBYTES
) -> bytes:
    """Return a regular file's bytes. Raises `error` if it is unreadable or above `most_nbytes`."""
    try:
        return read_bytes(user_path(path, error), most_nbytes)
    except OSError as failure:
        raise error(f"{path}: cannot be read: {failure.strerror or failure}") from failure


def read_json(path: Path, error: type[HetpipeError]) -> Any:
    """Return the data of a JSON file. Raises `error`, with the line if it is known."""
    text = read_text(path, error)
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_int=_whole, parse_constant=_constant
        )
    except json.JSONDecodeError as failure:
        why = f"column {failure.colno} is not JSON: {failure.msg}"
        raise error(f"{path}:{failure.lineno}: {why}") from failure
    except ValueError as failure:
        raise error(f"{path}: {failure}") from failure
    except RecursionError as failure:
        raise error(f"{path}: lists and objects are nested too deeply; nest them less") from failure


_ALLOWED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_short": "text that is not empty",
    "too_short": "a list of {min_length} or more entries, not {actual_length}",
    "too_long": "a list of at most {max_length} entries, not {actual_length}",
}
"""The expected value, by pydantic's type of error."""


def _allowed(detail: ErrorDetails) -> str:
    if detail["type"] not in _ALLOWED:
        return f"otherwise: {detail['msg']}"
    limits = detail.get("ctx", {}).items()
    plain = {key: f"{limit:g}" if isinstance(limit, float) else limit for key, limit in limits}
    return _ALLOWED[detail["type"]].format(**plain)


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return an adapter that forbids unknown keys, in the dataclasses inside as well."""
    from pydantic import TypeAdapter

    return TypeAdapter(list[kind], config={"extra": "forbid"})


def _keys(kind: Any, place: Place) -> list[str]:
    """Return the keys of the record at a place."""
    for part in place:
        if is_dataclass(kind):
            kind = get_type_hints(kind)[str(part)]
        else:
            kind = get_args(kind)[1 if get_origin(kind) is dict else 0]
        if get_origin(kind) in (Union, UnionType):  # a record or None
            kind = next(one for one in get_args(kind) if one is not NoneType)
    return [entry.name for entry in fields(kind)]


def _left_out(kind: Any, data: Any, place: Place) -> Iterator[tuple[Place, str]]:
    """Yield (place, key) for each key that valid `data` omits, because the key has a default."""
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        for name in hints:
            if name not in data:
                yield place, name
            else:
                yield from _left_out(hints[name], data[name], (*place, name))
    elif get_origin(kind) is dict:
        for key, value in data.items():
            yield from _left_out(get_args(kind)[1], value, (*place, key))
    elif get_origin(kind) is tuple:
        for index, value in enumerate(data):
            yield from _left_out(get_args(kind)[0], value, (*place, index))


def with_place(make: Callable[[], T]) -> T:
    """Return a value of a record; add the value's place to a `HetpipeError`."""
    from pydantic_core import PydanticCustomError

    try:
        return make()
    except HetpipeError as refused:
        raise PydanticCustomError("refused", "{why}", {"why": str(refused)}) from refused


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {short(twice)} occurs twice in one object")
    return content


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"the number {digits[:10]}... has {len(digits)} digits, at most {MOST_DIGITS} are read"
        )
    return int(digits)


def _constant(word: str) -> float:
    raise ValueError(f"{word} is not JSON; write a finite number, or null where that is allowed")
