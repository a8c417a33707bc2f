"""Short texts for messages and tables, from values, names and figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches
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


def choices(name: object, known: Iterable[str]) -> str:
    """Return a hint about an unknown name: the names most like it, then all known names."""
    known = list(known)
    return f"{near(name, known)}known: {words(known) or 'none'}"


def near(name: object, known: Iterable[str]) -> str:
    """Return a question with the known names that contain `name` or are like it, or ""."""
    low, names = str(name).lower(), {each.lower(): each for each in known}
    if len(low) > _SHORT.maxstring:
        return ""
    pairs = [(each, *sorted((each, low), key=len)) for each in names]
    parts = [each for each, part, whole in pairs if len(part) >= LEAST_PART and part in whole]
    alike = parts or get_close_matches(low, names, MOST_NEAR, LIKENESS)
    found = [word(names[each]) for each in alike[:MOST_NEAR]]
    ends = filter(None, (", ".join(found[:-1]), *found[-1:]))
    return f"did you mean {' or '.join(ends)}? " if found else ""


LEAST_PART = 3  # letters of a name that makes another name similar
MOST_NEAR = 4
LIKENESS = 0.65  # of `difflib`, from 0 to 1; "gtp" and "gpt" have 0.67


def format_s(time_s: float) -> str:
    """0.00123 -> "1.23 ms"; infinite -> "-"."""
    if math.isinf(time_s):
        return "-"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if time_s * factor >= 1.0:
            return f"{time_s * factor:.3g} {unit}"
    return f"{time_s * 1e6:.3g} us"


def format_nbytes(nbytes: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.3g} TiB"


def format_rate(per_s: float) -> str:
    """1234.5 -> "1234/s"; small rates keep three digits."""
    return f"{per_s:.0f}/s" if per_s >= 100 else f"{per_s:.3g}/s"


class _Short(Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Shorten large numbers: Python refuses to print more than 4300 digits."""
        return repr(x) if x.bit_length() < 128 else f"a number of {x.bit_length()} bits"


_SHORT = _Short()
_SHORT.maxstring = _SHORT.maxother = 80
