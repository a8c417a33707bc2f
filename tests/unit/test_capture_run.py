"""Stage programs against eager autograd, over stages, micro-batches and decompositions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, check
from torch import nn


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn(self.stem(x)), inplace=True))
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return self.head(F.adaptive_avg_pool2d(F.relu(x + y), 1).flatten(1))


CASES = {
    "mlp": (Mlp, F.mse_loss, lambda: (torch.randn(12, 6).double(), torch.randn(12, 4).double())),
    "residual": (
        Residual,
        F.cross_entropy,
        lambda: (torch.randn(12, 3, 6, 6).double(), torch.randint(0, 5, (12,))),
    ),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_programs_equal_eager(name: str, stages: int, table: str) -> None:
    torch.manual_seed(1)
    make, loss_fn, batch = CASES[name]
    check(make().double(), loss_fn, batch(), stages, [4, 5, 3], TABLES[table])
