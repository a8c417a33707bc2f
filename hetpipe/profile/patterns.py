"""Patterns: layers whose programs differ only in names. They cost the same, so one is measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetpipe.capture.program import CONSTANT, Program, StageGraphs
from hetpipe.sdk.graph import graph_structure


@dataclass(frozen=True)
class Network:
    """A network cut after every layer, with the graphs of the first layer of each pattern.

    `layers` has the number of every layer's pattern.
    """

    patterns: tuple[StageGraphs, ...]
    layers: tuple[int, ...]

    @staticmethod
    def of(stages: Sequence[StageGraphs]) -> Network:
        """Return the network of `stages`; each stage has one layer."""
        numbers: dict[str, int] = {}
        layers = tuple(numbers.setdefault(pattern_of(stage), len(numbers)) for stage in stages)
        return Network(tuple(stages[layers.index(n)] for n in range(len(numbers))), layers)

    @property
    def firsts(self) -> tuple[int, ...]:
        """The first layer of each pattern. Its graphs are the pattern's graphs."""
        return tuple(self.layers.index(n) for n in range(len(self.patterns)))

    def nbytes(self, pattern: int, samples: int) -> int:
        """Return the bytes that a forward of this pattern reads and writes."""
        forward = self.patterns[pattern].passes[samples].forward
        return sum(slot.nbytes for slot in (*forward.inputs, *forward.outputs))


def pattern_of(stage: StageGraphs) -> str:
    """Return a key of a stage's programs. The names of layers, values and nodes do not count.

    Stages with equal keys have the same operators, arguments, shapes and dtypes at every size of
    micro-batch, the same roles and aliases of inputs and outputs, and the same constants.
    """
    digest = hashlib.sha256()
    names: dict[tuple[str, str], int] = {}
    for label, program in _programs(stage):
        slots = [
            (slot.role, names.setdefault(slot.key, len(names)), slot.shape, slot.dtype)
            for slot in (*program.inputs, *program.outputs)
        ]
        digest.update(repr((label, len(program.inputs), slots)).encode())
        digest.update(repr(graph_structure(program.graph)).encode())
    for (role, name), number in names.items():
        if role == CONSTANT:
            value = np.asarray(stage.constants[name])
            digest.update(repr((number, value.shape, value.dtype.str)).encode() + value.tobytes())
    return digest.hexdigest()


def _programs(stage: StageGraphs) -> Iterator[tuple[Any, Program]]:
    for size, passes in sorted(stage.passes.items()):
        yield (size, "forward"), passes.forward
        if passes.backward is not None:
            yield (size, "backward"), passes.backward
    if stage.update is not None:
        yield "update", stage.update
