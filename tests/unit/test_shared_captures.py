"""Tests share captures only between equal models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from captures import Shared, shared
from torch import nn


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 3))


def capture(of: nn.Module, loss_fn=F.mse_loss, rows: int = 4) -> Shared:
    return shared(of, loss_fn, (torch.ones(rows, 4), torch.ones(rows, 3)))


@pytest.mark.slow
def test_an_equal_model_has_the_same_capture() -> None:
    first, changed, frozen = model(), model(), model()
    kept = capture(first)
    with torch.no_grad():
        first[0].weight.zero_()  # after its capture
    assert capture(model()) is kept
    assert abs(kept.parameters["0.weight"]).max() > 0
    changed[1].p = 0.25
    frozen[0].requires_grad_(False)
    others = [capture(model(1)), capture(changed), capture(frozen), capture(model(), F.l1_loss)]
    others += [capture(model(), rows=2), capture(model(), lambda out, y: (out - y).sum())]
    assert all(other is not kept for other in others)


def test_stages_are_traced_once_for_the_same_arguments() -> None:
    kept = capture(model())
    (whole,), (again,) = (kept.stage_graphs([], [{}], [4], None) for _ in range(2))
    assert again is whole
    (smaller,) = kept.stage_graphs([], [{}], [2], None)
    assert smaller is not whole
    assert list(smaller.passes) == [2]
