"""Sources of mini-batches that workers import."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
WIDTH = 256


def batches(count: int, samples: int = 8, last: int = 8) -> Iterator[Pair]:
    """Yield mini-batches, the last one of `last` samples."""
    g = torch.Generator().manual_seed(1)
    for number in range(count):
        size = last if number == count - 1 else samples
        yield torch.randn(size, WIDTH, generator=g), torch.randint(0, 4, (size,), generator=g)


def example() -> Pair:
    return next(batches(1))


def uneven(**count: int) -> Iterator[Pair]:
    """Yield as many mini-batches as `count` says for this process's host."""
    return batches(count[os.environ.get("REMOTE_DATA", "here")])


def unlike() -> Iterator[Pair]:
    return batches(1, last=6 if "REMOTE_DATA" in os.environ else 8)


def broken() -> Iterator[Pair]:
    if "REMOTE_DATA" in os.environ:
        raise FileNotFoundError("no /data here")
    return batches(2)


def out_of_range() -> list[Pair]:
    return [(torch.zeros(8, WIDTH), torch.full((8,), 4))]


def ignored() -> list[Pair]:
    return [(torch.zeros(8, WIDTH), torch.tensor([-100, -100, -100, 0, 0, 0, 0, 0]))]


def number() -> int:
    return 3
