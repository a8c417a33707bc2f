"""Windows along a dimension, of tensors in any layout, with their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opencl_devices import IDS, close_to_torch, opencl_device

pytestmark = [pytest.mark.wide, pytest.mark.parametrize("device_id", IDS)]

WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "apart": lambda x: x.unfold(1, 2, 3),
    "overlapping": lambda x: x.unfold(1, 3, 2),
    "of the first dimension": lambda x: x.unfold(0, 2, 1),
    "the whole dimension": lambda x: x.unfold(-1, 5, 1),
    "of single elements": lambda x: x.unfold(1, 1, 1),
    "of a slice": lambda x: x[1:, 1:-1].unfold(1, 2, 2),
    "of a transposed tensor": lambda x: x.t().unfold(0, 2, 2),
    "of windows": lambda x: x.unfold(0, 2, 1).unfold(1, 3, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_and_their_gradient(device_id: str, name: str) -> None:
    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = WINDOWS[name](x)
            (gradient,) = torch.autograd.grad((y * y).sum(), x)
        return y.detach(), gradient

    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    close_to_torch(opencl_device(device_id), both, x)
