"""Models that together contain everything that makes partitioning hard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Case:
    """A model, its loss and a source of mini-batches of `mini_batch` samples."""

    model: Callable[[], nn.Module]
    loss_fn: Callable[[Any, Any], Any]
    batch: Callable[[torch.Generator], tuple[Any, Any]]
    mini_batch: int = 12


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 16),
            nn.Sigmoid(), nn.Linear(16, 5),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return mini-batches of 12 samples for `MLP` and `Normalized`."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(12, 20, generator=generator), torch.randint(0, 5, (12,), generator=generator))
        for _ in range(count)
    ]


class Normalized(nn.Module):
    """Batch norm and dropout: training and evaluation differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inside == outside
            else nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.bn1(self.conv1(x)))
        return F.silu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResidualCNN(nn.Module):
    """Batch norm, strides, 1x1 shortcuts, pooling, a bias that batch norm makes useless."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.blocks(F.silu(self.bn(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class TwoBranch(nn.Module):
    """Two parallel branches, and a skip from the input layer to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(20, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.merge = nn.Linear(32, 16)
        self.last = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        entry = F.silu(self.entry(x))
        left, right = torch.tanh(self.left(entry)), torch.sigmoid(self.right(entry))
        merged = self.merge(torch.cat([left, right], 1))
        return self.last(merged * 0.5 + entry)


class Transposed(nn.Module):
    """A linear layer with the transposed weight of another layer and a separate bias."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.weight = other.weight
        self.bias = nn.Parameter(torch.zeros(other.in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class TiedAutoencoder(nn.Module):
    """An autoencoder whose decoder weights are the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(20, 16)
        self.squeeze = nn.Linear(16, 8)
        self.expand = Transposed(self.squeeze)
        self.decode = Transposed(self.encode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = torch.tanh(self.squeeze(torch.tanh(self.encode(x))))
        return self.decode(torch.tanh(self.expand(code)))


def _vectors(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(12, 20, generator=generator), torch.randint(0, 5, (12,), generator=generator)


def _images(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(32, 1, 8, 8, generator=generator)
    return x, torch.randint(0, 5, (32,), generator=generator)


def _itself(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(12, 20, generator=generator)
    return x, x


CASES: dict[str, Case] = {
    "mlp": Case(MLP, F.cross_entropy, _vectors),
    "residual_cnn": Case(ResidualCNN, F.cross_entropy, _images, mini_batch=32),
    "two_branch": Case(TwoBranch, F.cross_entropy, _vectors),
    "tied_autoencoder": Case(TiedAutoencoder, F.mse_loss, _itself),
}
