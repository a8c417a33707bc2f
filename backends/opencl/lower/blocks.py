"""Divides launches into blocks: the first rows of an output can be sent while a launch runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from .expr import Value
from .launch import Launch
from .lowering import Output

COUNT = 16
"""Blocks per launch; a launch with fewer steps stays whole."""

Block = tuple[tuple[int, ...] | None, tuple[int, ...]]
"""Offset (None: none) and size of a part of a launch's range."""


class Part(NamedTuple):
    """Elements lo..hi of an output are complete when this block of a launch has ended."""

    output: int
    lo: int
    hi: int
    launch: int
    block: int


def blocks_of(launch: Launch) -> list[Block]:
    """Return the blocks of a launch along its first dimension; empty if it stays whole."""
    steps, rest = launch.global_size[0], launch.global_size[1:]
    if not launch.step or launch.steady or steps < COUNT:
        return []
    bounds = [steps * part // COUNT for part in range(COUNT + 1)]
    zeros = (0,) * len(rest)
    return [((lo, *zeros), (hi - lo, *rest)) for lo, hi in pairwise(bounds)]


def finished_parts(outputs: Sequence[Output], launches: Sequence[Launch]) -> list[Part]:
    """Return the parts of outputs that blocks of launches complete, in order.

    The first launch with steps that touches a tensor counts as its writer. If that launch only
    reads the tensor, an earlier launch has completed the tensor, since the queue is in order.
    """
    makers: dict[int, int] = {}
    for number, launch in enumerate(launches):
        if launch.step:
            makers = dict.fromkeys(launch.touches, number) | makers
    parts = []
    for index, output in enumerate(outputs):
        value = output.value
        if value is None or value.id not in makers:
            continue
        number = makers[value.id]
        launch, reached = launches[number], 0
        for block, (_, size) in enumerate(blocks_of(launch) if _fits(value, launch) else ()):
            lo, reached = reached, min(reached + size[0] * launch.step, math.prod(value.shape))
            parts.append(Part(index, lo, reached, number, block))
    return parts


def _fits(value: Value, launch: Launch) -> bool:
    """Return whether the launch's steps together cover exactly the elements of the tensor."""
    count = math.prod(value.shape)
    return (launch.global_size[0] - 1) * launch.step < count <= launch.global_size[0] * launch.step
