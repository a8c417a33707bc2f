"""Named tensors that are read when they are needed, so that few are in memory at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


class Outline(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Tensors(Mapping[str, Array]):
    """Tensors by name. Each access reads the tensor anew; `outlines` reads nothing.

    `each` yields the tensors of some names, in the order of the names.
    """

    def __init__(
        self,
        outlines: Mapping[str, Outline],
        each: Callable[[Sequence[str]], Iterator[Array]],
    ) -> None:
        self.outlines, self.each = outlines, each

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Tensors:
        """Return arrays as tensors, or tensors unchanged."""
        if isinstance(arrays, Tensors):
            return arrays
        outlines = {name: Outline(array.shape, array.dtype) for name, array in arrays.items()}
        return cls(outlines, lambda names: (arrays[name] for name in names))

    def arrays(self) -> dict[str, Array]:
        """Return all tensors."""
        return dict(zip(self, self.each([*self]), strict=True))

    def over(self, others: Tensors) -> Tensors:
        """Return these tensors, and the tensors of `others` whose names they lack."""
        outlines = {**others.outlines, **self.outlines}
        return Tensors(outlines, lambda ns: ((self if n in self else others)[n] for n in ns))

    @classmethod
    def joined(cls, parts: Iterable[Tensors]) -> Tensors:
        """Return the tensors of all parts."""
        owners = {name: part for part in parts for name in part}
        outlines = {name: part.outlines[name] for name, part in owners.items()}
        return cls(outlines, lambda names: (owners[name][name] for name in names))

    def only(self, names: Collection[str]) -> Tensors:
        """Return the tensors among `names`."""
        return Tensors({n: o for n, o in self.outlines.items() if n in names}, self.each)

    def renamed(self, names: Mapping[str, str]) -> Tensors:
        """Return tensors by new names; `names` has the present name of each."""
        outlines = {new: self.outlines[old] for new, old in names.items()}
        return Tensors(outlines, lambda news: self.each([names[new] for new in news]))

    def __getitem__(self, name: str) -> Array:
        self.outlines[name]  # raises KeyError
        (array,) = self.each([name])
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self.outlines)

    def __len__(self) -> int:
        return len(self.outlines)
