"""`Collected` joins mini-batches of unlike lengths."""

from __future__ import annotations

import torch

from hetpipe.hf.collected import Collected


def test_shorter_mini_batches_are_padded() -> None:
    collected = Collected(None, "eval_")
    for length in (3, 2):
        collected.update(torch.ones(1, length, 2), torch.full((1, length), 7))
    assert collected.logits.shape == (2, 3, 2)
    assert collected.logits[1].tolist() == [[1, 1], [1, 1], [-100, -100]]
    assert collected.labels.tolist() == [[7, 7, 7], [7, 7, -100]]


def test_labels_of_one_axis_are_joined() -> None:
    collected = Collected(None, "eval_")
    for size in (2, 1):
        collected.update(torch.ones(size, 4), torch.arange(size))
    assert collected.logits.shape == (3, 4)
    assert collected.labels.tolist() == [0, 1, 0]
