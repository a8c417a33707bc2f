"""Work: the operations and bytes of layers, whatever device does them. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cost.table import LayerBytes


@dataclass(frozen=True)
class Kernel:
    """One operator: a multiplication and an addition are two operations; bytes read and written."""

    operations: float
    nbytes: int


@dataclass(frozen=True)
class LayerWork:
    """The operators of a layer's passes for one micro-batch, and those of its update."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    update: tuple[Kernel, ...]


@dataclass(frozen=True)
class ModelWork:
    """All layers of a model at micro-batches of `samples`."""

    model: str
    samples: int
    layers: tuple[LayerWork, ...]
    nbytes: tuple[LayerBytes, ...]
