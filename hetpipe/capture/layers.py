"""A model as the planner sees it, without torch: layers, and the bytes that cross cuts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hetpipe.errors import CaptureError


@dataclass(frozen=True)
class Layer:
    """A unit that the planner does not cut: operators up to the start of the next layer."""

    index: int
    name: str  # path of the module in the model; a second call of the module adds "#2"
    operators: tuple[str, ...]  # distinct, in order of first use, before decomposition
    parameters: tuple[str, ...]  # first names of the parameters that the layer reads
    params_nbytes: int


@dataclass(frozen=True)
class LayerGraph:
    """The layers of a model for micro-batches of `samples`.

    `cut_nbytes[i]` counts the bytes that cross in a forward if the model is cut after layer i: all
    tensors that layers 0..i compute and later layers read. So a skip connection counts at every cut
    between its ends.
    """

    samples: int
    layers: tuple[Layer, ...]
    cut_nbytes: tuple[int, ...]  # one fewer than layers

    def __len__(self) -> int:
        return len(self.layers)


def check_cuts(cuts: Sequence[int], tables: int, layers: int) -> None:
    """Raise `CaptureError` unless the cuts divide the layers into one stage for each table."""
    bounds = [0, *cuts, layers]
    if any(a >= b for a, b in pairwise(bounds)):
        raise CaptureError(
            f"cuts {list(cuts)} must increase strictly, and each must be above 0 and below "
            f"{layers}, the number of layers"
        )
    if tables != len(cuts) + 1:
        raise CaptureError(
            f"{tables} decomposition tables for {len(cuts) + 1} stages; give one per stage"
        )
