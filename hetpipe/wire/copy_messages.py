"""Messages that copy a worker's values to the controller."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.wire.wire import Array


@dataclass(frozen=True)
class Copy:
    """Copy these values, by stage, and send them in pieces beside the next steps.

    A value is a role and a name. The worker does not reply.
    """

    number: int
    values: Mapping[int, Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class Copied:
    """A piece of the values that a `Copy` asked for, by role and name."""

    number: int
    values: Mapping[tuple[str, str], Array]
