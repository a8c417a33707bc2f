"""Work: the operations and bytes of layers, on any device."""

from __future__ import annotations

from dataclasses import dataclass

from hetpipe.cost.table import LayerBytes


@dataclass(frozen=True)
class ProductShape:
    """A matrix product C (rows x cols) = A (rows x depth) B (depth x cols), `batches` times."""

    batches: int
    rows: int
    cols: int
    depth: int

    @property
    def macs(self) -> int:
        """The number of multiply-adds."""
        return self.batches * self.rows * self.cols * self.depth


@dataclass(frozen=True)
class Kernel:
    """The work of one operator.

    `operations` counts a multiply-add as two. `nbytes` are read or written. `products` are the
    matrix products that the operator computes.
    """

    operations: float
    nbytes: int
    products: tuple[ProductShape, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The operators of a layer's forward, backward and update, for one micro-batch."""

    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    update: tuple[Kernel, ...]


@dataclass(frozen=True)
class ModelWork:
    """The work of all layers of a model, for micro-batches of `samples`."""

    model: str
    samples: int
    layers: tuple[LayerWork, ...]
    nbytes: tuple[LayerBytes, ...]
