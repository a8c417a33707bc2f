"""The shapes of a model's output, and random outputs with these shapes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten


@dataclass(frozen=True)
class Outputs:
    """The structure of a model's output for `samples` samples: shapes and dtypes of its tensors."""

    samples: int
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, output: Any, samples: int) -> Outputs:
        """Return the structure of an output, whose tensors may lack values."""
        leaves, spec = tree_flatten(output)
        return cls(samples, tuple(map(_describe_leaf, leaves)), spec)

    def elements(self, samples: int) -> int:
        """Return the number of elements for `samples` samples."""
        sizes = [math.prod(leaf.shape) for leaf in self.leaves if isinstance(leaf, _Shape)]
        return sum(sizes) * samples // self.samples

    def draw(self, samples: int, is_wide: bool = False) -> list[Any] | None:
        """Draw leaves for `samples` samples; None if a leaf is not batch-first and floating.

        Numbers between 0 and 1 are valid as logits, as probabilities and as quantities. Wide ones
        have both signs, like the logits of a trained model.
        """
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, _Shape):
                if leaf.shape[:1] != (self.samples,) or not leaf.dtype.is_floating_point:
                    return None
                shape = (samples, *leaf.shape[1:])
                values = 3 * torch.randn(shape) if is_wide else torch.rand(shape) * 0.9 + 0.05
                leaves.append(values.to(leaf.dtype))
            elif leaf is None or isinstance(leaf, (bool, str, float)):
                leaves.append(leaf)
            else:
                return None
        return leaves


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _describe_leaf(leaf: Any) -> Any:
    return _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
