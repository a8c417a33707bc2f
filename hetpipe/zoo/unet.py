"""U-Net (Ronneberger et al., MICCAI 2015) with padded convolutions: classifies every pixel."""

from __future__ import annotations

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights


class DoubleConv(nn.Sequential):
    """Two 3x3 convolutions, each with batch norm and ReLU."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(
            nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
            nn.Conv2d(outer, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
        )  # fmt: skip


class UNet(nn.Module):
    """(n, 3, size, size) -> (n, classes, size, size); halves and doubles the size `depth` times."""

    def __init__(self, width: int = 64, depth: int = 4, classes: int = 21) -> None:
        super().__init__()
        widths = [width * 2**number for number in range(depth + 1)]
        self.first = DoubleConv(3, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(a, 2 * a) for a in widths[:-1])
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(2 * a, a, 2, stride=2) for a in reversed(widths[:-1])
        )
        self.join = nn.ModuleList(DoubleConv(2 * a, a) for a in reversed(widths[:-1]))
        self.last = nn.Conv2d(width, classes, 1)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(self.pool(kept[-1])))
        y = kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            y = join(torch.cat([kept.pop(), up(y)], 1))
        output: torch.Tensor = self.last(y)
        return output


def _unet(width: int, depth: int, size: int, mini_batch: int, classes: int = 21) -> RandomModel:
    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(samples, 3, size, size, generator=generator)
        return x, torch.randint(classes, (samples, size, size), generator=generator)

    return RandomModel(lambda: UNet(width, depth, classes), draw, mini_batch, optim.adam(lr=1e-3))


MODELS = {
    "unet": _unet(64, 4, 256, 8),  # 31 M parameters
    "unet-small": _unet(8, 2, 32, 4),
}
