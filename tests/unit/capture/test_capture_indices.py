"""The host checks the indices of a batch: numpy wraps -1, and devices disagree on larger errors."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetpipe.capture import Captured
from hetpipe.errors import HetpipeError


class Net(nn.Module):
    """A model that uses indices for lookups, gathers and one-hot, and `kind` also for a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.bag = nn.EmbeddingBag(9, 8)
        self.table = nn.Parameter(torch.randn(7, 8))
        self.head = nn.Linear(8, 5)

    def forward(
        self, ids: torch.Tensor, bag: torch.Tensor, row: torch.Tensor, pick: torch.Tensor,
        kind: torch.Tensor, level: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        x = self.tokens(ids[:, :-1]).mean(1) + self.bag(bag)
        x = x + self.table[row] + self.table.index_select(0, level.flatten())
        out = self.head(x)
        out = out + out.gather(1, pick.view(-1, 1)) + F.one_hot(kind.long(), 5)
        return torch.where(kind.view(-1, 1) > 200, out, -out)


def _loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return a next-token loss: it shifts out the first class and ignores the last position."""
    shifted = F.pad(y, (0, 1), value=-1)[:, 1:].reshape(-1)
    return F.cross_entropy(out.repeat_interleave(2, 0), shifted, ignore_index=-1)


def _batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    zeros = torch.zeros(6, dtype=torch.int64)
    leaves = {
        "ids": torch.zeros(6, 4, dtype=torch.int32), "bag": torch.zeros(6, 3, dtype=torch.int64),
        "row": zeros, "pick": zeros, "kind": zeros.to(torch.uint8), "level": zeros.view(6, 1),
    }  # fmt: skip
    return leaves, torch.zeros(6, 2, dtype=torch.int64)


@functools.cache
def _captured() -> Captured:
    torch.manual_seed(0)
    return Captured(Net(), _loss, _batch())


def _with(leaf: str, place: tuple[int, ...], value: int) -> tuple[Any, Any]:
    x, y = _batch()
    x = {name: tensor.clone() for name, tensor in x.items()}
    (y if leaf == "y" else x[leaf.removeprefix("x.")])[place] = value
    return x, y


@pytest.mark.parametrize(
    ("leaf", "place", "value", "message"),
    [
        ("x.ids", (3, 1), 11, "x.ids[3, 1] is 11, but embedding of tokens has 11 rows: give 0..10"),
        ("x.ids", (0, 0), -1, "x.ids[0, 0] is -1, but embedding of tokens has 11 rows"),
        ("x.bag", (5, 2), 9, "x.bag[5, 2] is 9, but embedding_bag of bag has 9 rows: give 0..8"),
        ("x.row", (2,), 7, "x.row[2] is 7, but indexing has 7 entries in dimension 0: give -7..6"),
        ("x.row", (2,), -8, "x.row[2] is -8, but indexing has 7 entries"),
        ("x.level", (4, 0), -1, "x.level[4, 0] is -1, but index_select has 7 entries"),
        ("x.pick", (1,), 5, "x.pick[1] is 5, but gather has 5 entries in dimension 1: give 0..4"),
        ("x.kind", (0,), 255, "x.kind[0] is 255, but one_hot has 5 classes: give 0..4"),
        ("y", (3, 1), 10, "y[3, 1] is 10, but cross_entropy has 5 classes: give 0..4, or -1 to"),
    ],
)
def test_out_of_range(leaf: str, place: tuple[int, ...], value: int, message: str) -> None:
    with pytest.raises(HetpipeError) as caught:
        _captured().leaves(*_with(leaf, place, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("leaf", "place", "value"),
    [
        ("x.ids", (3, 1), 10),
        ("x.ids", (3, 3), 500),  # sliced away
        ("x.row", (2,), -7),  # counts from the end, as in torch
        ("y", (3, 1), -1),  # ignored
        ("y", (3, 0), 99),  # shifted out
    ],
)
def test_in_range(leaf: str, place: tuple[int, ...], value: int) -> None:
    batch = _with(leaf, place, value)
    assert set(_captured().leaves(*batch)) == {*(f"x.{name}" for name in batch[0]), "y"}


def test_batches_of_any_size() -> None:
    x, y = _with("x.ids", (5, 2), 12)
    many = {name: torch.cat([tensor] * 3) for name, tensor in x.items()}, torch.cat([y] * 3)
    with pytest.raises(HetpipeError, match=r"x\.ids\[5, 2\] is 12"):
        _captured().leaves(*many)
    few = {name: tensor[:4] for name, tensor in x.items()}, y[:4]
    assert _captured().leaves(*few)["y"].shape == (4, 2)


@pytest.mark.parametrize(
    ("loss_fn", "shape"),
    [
        (F.cross_entropy, (6,)),
        (lambda out, y: F.nll_loss(F.log_softmax(out, 1), y), (6,)),
        (lambda out, y: F.cross_entropy(out.unsqueeze(-1), y), (6, 1)),
        (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), (6,)),
    ],
)
def test_losses(loss_fn: Any, shape: tuple[int, ...]) -> None:
    x, y = torch.randn(6, 3), torch.zeros(shape, dtype=torch.int64)
    captured = Captured(nn.Linear(3, 5), loss_fn, (x, y))
    y[2] = -100
    assert captured.leaves(x, y)
    y[3] = 5
    with pytest.raises(HetpipeError, match=r"y\[3.* is 5, but .* has 5 classes: give 0\.\.4, or"):
        captured.leaves(x, y)


def test_computed_indices_are_not_checked() -> None:
    """The model may compute an index from numbers that would be no valid index themselves."""

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x % 4)

    x, y = torch.arange(6) * 1000, torch.zeros(6, dtype=torch.int64)
    assert Captured(Hashed(), F.cross_entropy, (x, y)).leaves(x, y)
