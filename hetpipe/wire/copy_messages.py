"""Messages that copy a worker's values to the controller.

A controller on the worker's host lends memory, and the worker copies into it:

    Lend, descriptor -->  map
    Copy ------------->   copy into the memory
    <------------------   Stored

Otherwise the worker copies into its own memory, and sends the values in pieces:

    Copy ------------->   copy
    <------------------   Copied, Copied, ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetpipe.wire.wire import Array

Key = tuple[str, str]
"""Role and name of a value."""


@dataclass(frozen=True)
class Lend:
    """Copy into this memory, whose descriptor comes with the message, until the next `Begin`."""

    memory: int


@dataclass(frozen=True)
class Copy:
    """Copy values of these stages: into a lent memory, to the places in bytes, or into pieces.

    The worker does not reply.
    """

    number: int
    places: Mapping[int, Mapping[Key, int]]
    nbytes: int  # of the memory
    memory: int | None


@dataclass(frozen=True)
class Stored:
    """The values that a `Copy` asked for are in the lent memory."""

    number: int
    keys: Sequence[Key]


@dataclass(frozen=True)
class Copied:
    """A piece of the values that a `Copy` asked for."""

    number: int
    values: Mapping[Key, Array]
