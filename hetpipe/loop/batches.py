"""Batches: the mini-batches `(x, y)` of each epoch, from whatever the user gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from hetpipe.errors import HetpipeError
from hetpipe.words import choices, short, words

Source = Iterable[Any] | Callable[[int], Iterable[Any]]
"""An iterable of mini-batches, or a function of the number of the epoch that returns one."""
Split = str | Sequence[str] | Callable[[Any], tuple[Any, Any]]
"""The name or names of the labels in a batch that is a dict, or a function that returns (x, y)."""


class Batches:
    """The mini-batches of each epoch. Raises `HetpipeError` for a source that ends too early."""

    def __init__(self, source: Source, split: Split | None, name: str, epochs: int) -> None:
        if not is_iterable(source) and not callable(source):
            raise HetpipeError(
                f"{name} is {short(source)}: give an iterable of mini-batches, such as a list or a "
                "DataLoader, or a function of the epoch that returns one"
            )
        if epochs > 1 and isinstance(source, Iterator):
            raise HetpipeError(
                f"{name} is {short(source)}, which can be iterated only once, and epochs={epochs}: "
                "give a list, a DataLoader, or a function of the epoch that returns an iterable"
            )
        self._source, self._split, self._name = source, split, name

    @property
    def loader(self) -> object:
        """The iterable that serves every epoch; None if a function makes one for each."""
        return self._source if is_iterable(self._source) else None

    def of(self, epoch: int) -> Any:
        """Return the iterable of an epoch, which counts from 1."""
        source: Any = self._source
        if is_iterable(source):
            return source
        made = source(epoch)
        if not is_iterable(made):
            raise HetpipeError(f"{self._name}({epoch}) is {short(made)}: return an iterable")
        return made

    def pair(self, batch: Any) -> tuple[Any, Any]:
        """Return a batch as `(x, y)`. Raises `HetpipeError`."""
        split = self._split
        pair, cure = batch, "give split=, a function of the batch that returns (x, y)"
        if callable(split):
            pair, cure = split(batch), "the function split must return (x, y)"
        elif split is not None:
            return self._without(batch, (split,) if isinstance(split, str) else tuple(split))
        if isinstance(pair, Mapping):
            raise HetpipeError(
                f"a batch of {self._name} is a dict with {words(map(str, pair))}: name its labels "
                f'with split=, as split="{_likely(pair)}"'
            )
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            kind = type(pair).__name__
            size = f" of {len(pair)} entries" if isinstance(pair, (tuple, list)) else ""
            raise HetpipeError(
                f"a batch of {self._name} is a {kind}{size}, not a pair (x, y): {cure}"
            )
        x, y = pair
        return x, y

    def _without(self, batch: Any, labels: tuple[str, ...]) -> tuple[Any, Any]:
        """Divide a dict into inputs and labels."""
        if not isinstance(batch, Mapping):
            raise HetpipeError(
                f"split={self._split!r} names labels of a dict, and a batch of {self._name} is a "
                f"{type(batch).__name__}: leave split out for pairs, or give a function"
            )
        for name in labels:
            if name not in batch:
                raise HetpipeError(
                    f"split={self._split!r}: a batch of {self._name} has no {name!r}; "
                    f"{choices(name, map(str, batch))}"
                )
        x = {name: value for name, value in batch.items() if name not in labels}
        y = tuple(batch[name] for name in labels)
        return x, y[0] if isinstance(self._split, str) else y


def is_iterable(source: object) -> bool:
    """Return whether `iter` takes an object."""
    return isinstance(source, Iterable) or hasattr(type(source), "__getitem__")


def length_of(source: Any) -> int | None:
    """Return the number of mini-batches in an iterable, if it is known."""
    try:
        return len(source)
    except TypeError:
        return None


def _likely(batch: Mapping[Any, Any]) -> str:
    """Return the entry of a dict that is probably the labels."""
    names = list(map(str, batch)) or ["labels"]
    return next((name for name in ("labels", "label", "y") if name in names), names[-1])
