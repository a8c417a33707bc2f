"""A model as the planner sees it, without torch: layers, and the bytes that cross cuts."""

from __future__ import annotations

from dataclasses import dataclass


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
