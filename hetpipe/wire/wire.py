"""Wires: what travels between two replicas of stages, and how a message lies in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from hetpipe.capture.program import Slot
from hetpipe.errors import HetpipeError
from hetpipe.wire.channel import ALIGN, aligned
from hetpipe.wire.shares import Place

Array = np.ndarray[Any, Any]
Layout = tuple[Slot, ...]
Kind = tuple[str, int]
"""A message's letter (see `Message.kind`) and its micro-batch's samples, 0 for tied weights."""

FORWARD, BACKWARD, TIED_GRAD, TIED_PARAM = "FBGP"
EVALUATION = "E"  # forward, in evaluation
ALL_REDUCE = "A"
TIED = frozenset({TIED_GRAD, TIED_PARAM})
ROWS = {FORWARD: "f", BACKWARD: "b", EVALUATION: "e"}
"""Some rows of what a whole message has, see `hetpipe.wire.rows`."""
SUMS = {"F": "sF", "B": "sB", "I": "sI", "W": "sW", EVALUATION: "sE"}
"""By the letter of a pass: an exchange within it, see `hetpipe.worker.divided`. The number of
such a kind is its place in the pass."""
ON_HOST = TIED | {ALL_REDUCE, *ROWS.values(), *SUMS.values()}
"""Kinds whose tensors are summed, joined or replaced on the host."""

Axes = Mapping[str, int]
"""By tensor, the dimension of its rows."""


@dataclass(frozen=True)
class Wire:
    """What travels from one place to another: the layout of each kind of message.

    `axes` of the tensors of which rows travel, here or elsewhere between the same stages.
    """

    source: Place
    target: Place
    layouts: dict[Kind, Layout]
    axes: Axes = field(default_factory=dict)

    @property
    def packed_nbytes(self) -> int:
        """Room that the largest message needs."""
        return max(packed_nbytes(layout) for layout in self.layouts.values())


def host_dtype(name: str) -> np.dtype[Any]:
    """The numpy type in which a tensor is uploaded, downloaded and sent."""
    if name == "bfloat16":
        raise HetpipeError(
            "a bfloat16 tensor would leave its device, and host tensors are numpy's, which has no "
            "bfloat16; cast to float32 or float16 at the cut, or cut elsewhere"
        )
    return np.dtype(name)


@lru_cache(maxsize=256)
def offsets(layout: Layout) -> tuple[int, ...]:
    """Where each tensor begins in a message; in front there is room for the time of delivery."""
    found, offset = [], ALIGN
    for slot in layout:
        found.append(offset)
        offset = aligned(offset + slot.nbytes)
    return (*found, offset)


def packed_nbytes(layout: Layout) -> int:
    """Bytes of a whole message."""
    return offsets(layout)[-1]


def tensor_nbytes(layout: Layout) -> int:
    """Bytes of its tensors alone."""
    return sum(slot.nbytes for slot in layout)


def arrays_in(memory: Any, layout: Layout, base: int = 0) -> list[Array]:
    """The tensors of a message as arrays over `memory`, which begins at byte `base` of it."""
    return [
        np.ndarray(slot.shape, host_dtype(slot.dtype), memory, base + offset)
        for slot, offset in zip(layout, offsets(layout), strict=False)
    ]
