"""An exception in the user's model or loss is reported as the user's, with its line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetpipe.capture import Captured
from hetpipe.errors import CaptureError


class Net(nn.Module):
    def __init__(self, before: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.before = before
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.before(x))


def _key(x: torch.Tensor) -> torch.Tensor:
    return {"a": x}["b"]


def _bare(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError


def _unlike(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.zeros(5, 3)


def _branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def _wrong_loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(out.reshape(2, 2, 2), y)  # 8 elements instead of 12


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 3), torch.randn(4, 3)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (_key, r"^the model raised KeyError while .* at .*test_capture_exceptions.py:\d+ .*: 'b'$"),
        (_bare, r"^the model raised NotImplementedError while .*\(raise NotImplementedError\)$"),
        (_unlike, r"^the model raised RuntimeError .*x @ torch\.zeros\(5, 3\)\): .+"),
        (_branch, r"^the model cannot be exported at .*x\.sum\(\) > 0.*use torch\.where"),
    ],
)
def test_in_the_model(before: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Captured(Net(before), F.mse_loss, _batch())


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (_wrong_loss, r"^loss_fn raised \w+ while .*test_capture_exceptions.py:\d+ \(return F.mse"),
        (lambda out: out.sum(), r"^loss_fn raised TypeError while it was captured.*argument"),
    ],
)
def test_in_the_loss(loss_fn: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        Captured(Net(torch.tanh), loss_fn, _batch())
