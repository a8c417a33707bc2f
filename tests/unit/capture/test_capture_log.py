"""A wrong shape in a model gives one error, and torch does not log another traceback."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

from hetpipe.capture import Captured
from hetpipe.errors import CaptureError


class _Wrong(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) @ torch.zeros(5, 3)


def test_torch_logs_no_traceback_during_capture(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CaptureError, match="the model raised"):
        Captured(_Wrong(), functional.mse_loss, (torch.randn(4, 3), torch.randn(4, 3)))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert not logging.getLogger("torch._subclasses.fake_tensor").filters
