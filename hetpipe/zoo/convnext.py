"""ConvNeXt (Liu et al., CVPR 2022) at the size of ImageNet, and a small one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.random_data import images, random_workload
from hetpipe.zoo.vision import ConvNeXtBlock, LayerNorm2d
from hetpipe.zoo.workload import Workload


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
        logits: torch.Tensor = self.classifier(self.norm(self.features(x).mean((2, 3))))
        return logits


def convnext() -> Workload:
    """ConvNeXt-T: 29 M parameters."""
    return _workload("convnext", (96, 192, 384, 768), (3, 3, 9, 3), 224, 1000)


def convnext_small() -> Workload:
    """Two pairs of blocks, of width 16 and 32, for 32 x 32 images."""
    return _workload("convnext-small", (16, 32), (2, 2), 32, 10)


def _workload(
    name: str, widths: Sequence[int], depths: Sequence[int], size: int, classes: int
) -> Workload:
    return random_workload(
        name, lambda: ConvNeXt(widths, depths, classes), images(size, classes), 32,
        optim.adamw(lr=1e-3, weight_decay=0.05),
    )  # fmt: skip
