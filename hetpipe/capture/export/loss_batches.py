"""Makes micro-batches with the example's or other labels, to compare losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetpipe.capture.export.example import Example
from hetpipe.capture.export.index_bounds import IndexBound

MANY_LABELS = 64
"""With this many labels or more, the losses of two micro-batches do not agree by chance."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class LossBatches:
    """Makes joined micro-batches of `samples` samples each, as a list of the batch's leaves."""

    def __init__(self, example: Example, bounds: Sequence[IndexBound], samples: int) -> None:
        self._example, self._samples = example, samples
        self._leaves = example.tensors(example.samples)
        self._bounds = [bound for bound in bounds if bound.ignored is not None]

    @property
    def count(self) -> int:
        """Number of micro-batches in the example, at least 2."""
        return max(self._example.samples // self._samples, 2)

    @property
    def has_few_labels(self) -> bool:
        """Whether two micro-batches have so few labels that their losses may agree by chance."""
        first = dict(zip(self._example.names, self.from_example(2), strict=True))
        return 0 < sum(first[bound.leaf].numel() for bound in self._bounds) < MANY_LABELS

    def from_example(self, count: int) -> list[Tensor]:
        """Return the first `count` micro-batches of the example; a small example is repeated."""
        rows = count * self._samples
        if rows > self._example.samples:
            return self._example.tensors(rows)
        return [leaf[:rows] for leaf in self._leaves]

    def draw(self, count: int) -> list[Tensor]:
        """Return `count` micro-batches with shuffled rows, and with labels of all classes."""
        order = torch.randperm(count * self._samples)
        leaves = dict(zip(self._example.names, self.from_example(count), strict=True))
        leaves = {name: leaf[order] for name, leaf in leaves.items()}
        for bound in self._bounds:
            leaves[bound.leaf] = _relabel(leaves[bound.leaf], bound)
        for name, leaf in leaves.items():
            if name[0] == "y" and leaf.dtype not in _INTEGERS and bool((leaf == 1).all()):
                leaves[name] = torch.randint(2, leaf.shape).to(leaf.dtype)  # y may be a mask
        return list(leaves.values())


def _relabel(leaf: Tensor, bound: IndexBound) -> Tensor:
    """Replace the labels of a leaf by all classes in turn, in a random order.

    Ignored labels stay. The first class and the last class are always used, because one of them is
    often the background, to which a loss may give another weight.
    """
    assert bound.ignored is not None
    classes = torch.arange(bound.low, bound.high)
    classes = classes[classes != bound.ignored]
    if len(classes) < 2:
        return leaf
    inner = classes[1:-1]
    classes = torch.cat([classes[:1], classes[-1:], inner[torch.randperm(len(inner))]])
    rows = leaf.reshape(leaf.shape[0], -1)
    columns = slice(None) if bound.columns is None else list(bound.columns)
    drawn = rows.clone()
    count = drawn[:, columns].numel()
    labels = classes[torch.arange(count) % len(classes)][torch.randperm(count)]
    drawn[:, columns] = labels.reshape(drawn[:, columns].shape).to(leaf.dtype)
    return torch.where(rows.eq(bound.ignored), rows, drawn).reshape(leaf.shape)
