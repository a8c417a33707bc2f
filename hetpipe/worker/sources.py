"""Sources of mini-batches that live in a worker, so that no leaf crosses a network."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from hetpipe.capture.export.example import Example
from hetpipe.capture.export.index_bounds import Indices
from hetpipe.errors import HetpipeError
from hetpipe.wire.messages import Array
from hetpipe.wire.shares import Drawn, divide
from hetpipe.words import choices, short
from hetpipe.worker.blame import summary

END = 0
"""Says that the source has ended, where a number of samples would be."""


@dataclass(frozen=True)
class Recipe:
    """A source, `module:function` with keyword arguments, and the checks of its mini-batches."""

    function: str
    arguments: Mapping[str, Any]
    example: Example
    indices: Indices
    microbatches: int
    means: tuple[float, ...] | None
    """The shares of the last stage's replicas if losses are means, else None."""

    def make(self) -> Iterator[Any]:
        """Call the function."""
        place, _, name = self.function.partition(":")
        module = importlib.import_module(place)
        if not hasattr(module, name):
            raise HetpipeError(f"{place} has no {name!r}; {choices(name, vars(module))}")
        made = getattr(module, name)(**self.arguments)
        try:
            return iter(made)
        except TypeError:
            raise HetpipeError(
                f"{name} returned {short(made)}: return an iterable of mini-batches (x, y)"
            ) from None

    def leaves(self, batch: Any) -> dict[str, Array]:
        """Return the leaves of a mini-batch. Raises `HetpipeError` if it is not valid."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise HetpipeError(f"a mini-batch is {short(batch)}, not a pair (x, y)")
        leaves = self.example.leaves(*batch)
        samples = self.example.size_of(leaves)
        self.indices.check(leaves, samples)
        if self.means is not None:
            sizes = divide(samples, (1.0,) * min(self.microbatches, samples))
            parts = [rows for size in sizes for rows in divide(size, self.means)]
            self.indices.check_means(leaves, samples, parts)
        return leaves


class Source:
    """An open source, and the leaves of its present mini-batch."""

    def __init__(self, recipe: Recipe, skip: int) -> None:
        self._recipe = recipe
        self._batches = islice(recipe.make(), skip, None)
        self.leaves: dict[str, Array] = {}

    def draw(self) -> int:
        """Read the next mini-batch. Return its number of samples, or `END`."""
        for batch in self._batches:
            self.leaves = self._recipe.leaves(batch)
            return self._recipe.example.size_of(self.leaves)
        return END


_open: dict[tuple[int, str], Source] = {}
"""By the identity of the worker's device, and the key."""


def open_source(device: object, key: str, recipe: Recipe, skip: int) -> str:
    """Open a source, without its first `skip` mini-batches. Return the error, or ""."""
    try:
        _open[id(device), key] = Source(recipe, skip)
    except Exception as error:
        return summary(error)
    return ""


def draw(device: object, key: str) -> tuple[int, str]:
    """Read the next mini-batch. Return its number of samples, or `END`, and the error, or ""."""
    try:
        return _open[id(device), key].draw(), ""
    except Exception as error:
        return END, summary(error)


def close_source(device: object, key: str) -> None:
    """Forget a source."""
    _open.pop((id(device), key), None)


def leaves_of(device: object, drawn: Drawn) -> dict[int, list[dict[str, Array]]]:
    """Return the rows of the present mini-batch that each stage reads, by micro-batch."""
    leaves = _open[id(device), drawn.key].leaves
    return {stage: [_rows(leaves, *part) for part in parts] for stage, parts in drawn.parts.items()}


def _rows(leaves: Mapping[str, Array], names: Sequence[str], lo: int, hi: int) -> dict[str, Array]:
    return {name: np.asarray(leaves[name][lo:hi], order="C") for name in names}
