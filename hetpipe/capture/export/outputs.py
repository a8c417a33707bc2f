"""The structure of a model's output: which tensors have samples, and how to build it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.buckets import Size
from hetpipe.errors import HetpipeError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Outputs:
    """The structure of a model's output for `samples` samples: shapes and dtypes of its tensors."""

    samples: int
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, output: Any, samples: int) -> Outputs:
        """Return the structure of an output; its tensors may have no values."""
        leaves, spec = tree_flatten(output)
        described = (
            _Shape(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        )
        return cls(samples, tuple(described), spec)

    @property
    def count(self) -> int:
        """The number of tensors that have samples."""
        return sum(_has_samples(leaf, self.samples) for leaf in self.leaves)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the tensors that have samples."""
        return [leaf.shape for leaf in self.leaves if _has_samples(leaf, self.samples)]

    def elements(self, samples: int) -> int:
        """Return the number of elements for `samples` samples."""
        sizes = [math.prod(leaf.shape) for leaf in self.leaves if isinstance(leaf, _Shape)]
        return sum(sizes) * samples // self.samples

    def rebuild(self, arrays: Mapping[str, Array]) -> Any:
        """Return an output with these values for the tensors that have samples, by number.

        Raises `HetpipeError` for a model with another tensor in its output.
        """
        leaves, number = [], 0
        for place, leaf in enumerate(self.leaves):
            if _has_samples(leaf, self.samples):
                leaf, number = torch.from_numpy(arrays[str(number)]).to(leaf.dtype), number + 1
            elif isinstance(leaf, _Shape):
                raise HetpipeError(
                    f"tensor {place} of the model's output is {leaf.dtype}{list(leaf.shape)} for "
                    f"{self.samples} samples, and outputs of micro-batches are joined by their "
                    "samples: return tensors of real numbers whose first dimension is the samples"
                )
            leaves.append(leaf)
        return tree_unflatten(leaves, self.spec)

    def cut(
        self, arrays: Mapping[str, Array], length: int, other: Outputs, lengths: tuple[int, int]
    ) -> dict[str, Array]:
        """Return the tensors that have samples, by number, without their padding after `length`.

        `lengths` are the length of the batch and the length for which the `other` output was seen.
        A dimension that has these sizes in the two outputs is cut.
        """
        cut = {}
        shapes = zip(self.shapes, other.shapes, strict=True)
        for (number, array), pair in zip(sorted(arrays.items()), shapes, strict=True):
            varies = [sizes == lengths for sizes in zip(*pair, strict=True)]
            cut[number] = array[tuple(slice(length) if v else slice(None) for v in varies)]
        return cut

    def draw(self, samples: int, is_wide: bool = False) -> list[Any] | None:
        """Draw leaves for `samples` samples; None if a tensor is not batch-first and floating.

        Numbers between 0 and 1 are valid as logits, as probabilities and as quantities. Wide
        numbers have both signs, like the logits of a trained model.
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


class KnownOutputs:
    """The structures of a model's output that were seen, by mode and by length of the batch."""

    def __init__(self) -> None:
        self._seen: dict[tuple[bool, int], Outputs] = {}

    def note(self, size: int, training: bool, output: Any) -> None:
        """Note an output for a batch of this size, whose tensors may have no values."""
        self._seen[training, _length(size)] = Outputs.of(output, int(size))

    def has(self, size: int, training: bool) -> bool:
        """Return whether an output was seen for the length of this size."""
        return (training, _length(size)) in self._seen

    def of(self, size: int, training: bool) -> Outputs:
        """Return the structure that was seen for the length of this size."""
        return self._seen[training, _length(size)]


def _length(size: int) -> int:
    return size.length if isinstance(size, Size) else 0


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype


def tensors_of(output: Any, samples: int) -> list[Tensor]:
    """Return copies of an output's tensors whose first dimension is the samples.

    numpy lacks bfloat16, so such tensors become float32. Under autocast, every cast is kept: the
    copies have the dtypes that the tensors have without autocast.
    """
    found = [leaf for leaf in tree_flatten(output)[0] if _has_samples(leaf, samples)]
    return [
        _cast(leaf, torch.float32 if leaf.dtype is torch.bfloat16 else leaf.dtype) for leaf in found
    ]


def _cast(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    copy: Tensor = torch.ops.aten._to_copy.default(leaf, dtype=dtype)
    return copy


def _has_samples(leaf: Any, samples: int) -> bool:
    return (
        isinstance(leaf, (Tensor, _Shape))
        and tuple(leaf.shape[:1]) == (samples,)
        and not leaf.dtype.is_complex
    )
