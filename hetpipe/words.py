"""Short texts for messages, from values and names of any length."""

from __future__ import annotations

from collections.abc import Iterable
from reprlib import Repr


def short(value: object) -> str:
    """Return a short text of a value, which may be large or deep, for a message."""
    return _SHORT.repr(value)


def word(part: int | str) -> str:
    """Return a name for a message: unchanged, or shortened and quoted if long or not printable."""
    plain = isinstance(part, int) or (part.isprintable() and len(part) <= _SHORT.maxstring)
    return str(part) if plain else short(part)


def words(parts: Iterable[int | str]) -> str:
    """Join names with commas; after the first `MOST_WORDS`, give only the number of all names."""
    names = [word(part) for part in parts]
    rest = [f"... {len(names)} in all"] if len(names) > MOST_WORDS else []
    return ", ".join(names[:MOST_WORDS] + rest)


MOST_WORDS = 24


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Shorten large numbers: Python refuses to print more than 4300 digits."""
        return repr(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 80
