"""Numbers in environment variables."""

from __future__ import annotations

import math
import os

from hetpipe.errors import HetpipeError
from hetpipe.words import short


def seconds(name: str, usual_s: float, error: type[HetpipeError] = HetpipeError) -> float:
    """Return the seconds in an environment variable; `usual_s` if it is unset or empty.

    Raises `error` for anything else than a finite number above 0.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return usual_s
    try:
        value_s = float(text)
    except ValueError:
        value_s = math.nan
    if not 0 < value_s < math.inf:
        raise error(
            f"the environment variable {name} is {short(text)}; write a number of seconds above "
            f"0, such as {name}={usual_s:g}, or unset it"
        )
    return value_s
