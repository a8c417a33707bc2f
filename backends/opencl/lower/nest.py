"""Loops of a generated kernel: as few dimensions as possible, and the strides of each leaf."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .expr import Layout, Shape


class Nest:
    """A shape with adjacent dimensions merged wherever every layout allows it.

    `inner` is the size of the last dimension, `rows` the product of all other sizes.
    """

    def __init__(
        self, shape: Shape, layouts: Sequence[Layout], borders: Sequence[int] = ()
    ) -> None:
        """Merge dimensions, but never a dimension in `borders` with the dimension before it."""
        self.layouts = list(dict.fromkeys(layouts))
        sizes: list[int] = []
        strides: list[tuple[int, ...]] = []
        barrier = 0
        for d, size in enumerate(shape):
            if d in borders:
                barrier = len(sizes)
            if size == 1:
                continue
            step = tuple(layout.strides[d] for layout in self.layouts)
            merges = len(sizes) > barrier and all(
                outer == inner * size for outer, inner in zip(strides[-1], step, strict=True)
            )
            if merges:
                sizes[-1] *= size
                strides[-1] = step
            else:
                sizes.append(size)
                strides.append(step)
        self.shape = tuple(sizes)
        self._strides = (
            dict(zip(self.layouts, zip(*strides, strict=True), strict=True))
            if (strides)
            else dict.fromkeys(self.layouts, ())
        )

    @property
    def inner(self) -> int:
        """Number of elements in the innermost dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """Number of passes through the innermost dimension."""
        return math.prod(self.shape[:-1])

    def strides(self, layout: Layout) -> tuple[int, ...]:
        """Return the strides of a layout in the merged dimensions."""
        return self._strides[layout]

    def step(self, layout: Layout) -> int:
        """Return the stride of a layout in the innermost dimension."""
        strides = self._strides[layout]
        return strides[-1] if strides else 0
