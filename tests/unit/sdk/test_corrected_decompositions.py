"""Decompositions that replace torch's, compared with torch's own operators."""

from __future__ import annotations

import pytest
import torch

from hetpipe.sdk.operators.corrected import multilabel_margin_loss

LABELS = torch.tensor([[0, 3, -1, 2], [1, -1, -1, -1], [0, 1, 2, 3], [-1, 1, 1, 1], [3, 3, -1, 0]])


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("rows", [1, 5])
def test_labels_after_the_end_do_not_count(reduction: int, rows: int) -> None:
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = (x[0], LABELS[0]) if rows == 1 else (x, LABELS)
    expected = torch.ops.aten.multilabel_margin_loss_forward(*inputs, reduction)
    for value, wanted in zip(multilabel_margin_loss(*inputs, reduction), expected, strict=True):
        torch.testing.assert_close(value, wanted)
