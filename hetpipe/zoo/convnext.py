"""ConvNeXt (Liu et al., CVPR 2022), for ImageNet's images and for small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, images


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of (n, c, h, w)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A 7x7 convolution per channel, then two linear layers over the channels; adds its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.layer_scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.widen(y))).permute(0, 3, 1, 2)
        output: torch.Tensor = x + self.layer_scale * y
        return output


class ConvNeXt(nn.Module):
    """(n, 3, size, size) -> (n, classes)."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int], classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0])]
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if number:
                before = widths[number - 1]
                layers += [LayerNorm2d(before), nn.Conv2d(before, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        self.features = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(widths[-1])
        self.classifier = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.classifier(self.norm(self.features(x).mean((2, 3))))
        return output


def _convnext(widths: Sequence[int], depths: Sequence[int], size: int, classes: int) -> RandomModel:
    return RandomModel(
        lambda: ConvNeXt(widths, depths, classes), images(size, classes), 32,
        optim.adamw(lr=1e-3, weight_decay=0.05),
    )  # fmt: skip


MODELS = {
    "convnext": _convnext((96, 192, 384, 768), (3, 3, 9, 3), 224, 1000),  # ConvNeXt-T: 29 M
    "convnext-small": _convnext((16, 32), (2, 2), 32, 10),
}
