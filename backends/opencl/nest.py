"""The loops of a generated kernel: fewest dimensions, and how each leaf moves through them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .expr import Layout, Shape


class Nest:
    """A shape whose adjacent dimensions are merged wherever every layout allows it.

    `rows` are all dimensions but the last, `inner` is the last.
    """

    def __init__(
        self, shape: Shape, layouts: Sequence[Layout], borders: Sequence[int] = ()
    ) -> None:
        """No dimension in `borders` is merged with the one before it."""
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
        """Elements of the innermost dimension."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """How often the innermost dimension is walked."""
        return math.prod(self.shape[:-1])

    def strides(self, layout: Layout) -> tuple[int, ...]:
        """Strides of a layout in the merged dimensions."""
        return self._strides[layout]

    def step(self, layout: Layout) -> int:
        """Stride of a layout in the innermost dimension."""
        strides = self._strides[layout]
        return strides[-1] if strides else 0
