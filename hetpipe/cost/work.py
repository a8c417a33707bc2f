"""Work: the operations and bytes of layers, on any device. It needs no torch."""

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
        """Number of multiplications, each with an addition."""
        return self.batches * self.rows * self.cols * self.depth


@dataclass(frozen=True)
class Kernel:
    """One operator: its operations (a multiplication and an addition are two), and its bytes read
    and written.

    `products` are the matrix products that it computes.
    """

    operations: float
    nbytes: int
    products: tuple[ProductShape, ...] = ()


@dataclass(frozen=True)
class LayerWork:
    """The operators of a layer's forward and backward for one micro-batch, and of its update."""

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
