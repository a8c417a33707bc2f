"""Networks for images as in torchvision, on random images: for programs that measure times.

ResNet-18 (He et al., CVPR 2016) and ConvNeXt-T (Liu et al., CVPR 2022), for 64 x 64 images and ten
classes. Names of modules follow torchvision's.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.workload import Workload

SIZE = 64  # pixels of a side
CLASSES = 10


class BasicBlock(nn.Module):
    """Two convolutions and the skip, which a 1x1 convolution adapts to a new shape."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        summed: torch.Tensor = self.relu(y + self.downsample(x))
        return summed


class ResNet18(nn.Sequential):
    """(n, 3, 64, 64) -> (n, 10)."""

    def __init__(self) -> None:
        widths = (64, 64, 128, 256, 512)
        blocks = [
            block
            for inner, outer in pairwise(widths)
            for block in (
                BasicBlock(inner, outer, 1 + (inner != outer)),
                BasicBlock(outer, outer, 1),
            )
        ]
        super().__init__(
            nn.Conv2d(3, widths[0], 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], CLASSES),
        )


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of (n, c, h, w)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = super().forward(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """A 7x7 convolution per channel, then two linear layers over the channels, and the skip."""

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
        summed: torch.Tensor = x + self.layer_scale * y
        return summed


class ConvNeXtTiny(nn.Sequential):
    """(n, 3, 64, 64) -> (n, 10)."""

    def __init__(self) -> None:
        widths, depths = (96, 192, 384, 768), (3, 3, 9, 3)
        layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 4, 4), LayerNorm2d(widths[0])]
        for number, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            if number:
                before = widths[number - 1]
                layers += [LayerNorm2d(before), nn.Conv2d(before, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(depth)]
        head = [nn.AdaptiveAvgPool2d(1), LayerNorm2d(widths[-1]), nn.Flatten()]
        super().__init__(*layers, *head, nn.Linear(widths[-1], CLASSES))


def resnet18() -> Workload:
    """Return ResNet-18, with weights from a fixed seed."""
    return _workload(ResNet18, "resnet18")


def convnext_tiny() -> Workload:
    """Return ConvNeXt-T, with weights from a fixed seed."""
    return _workload(ConvNeXtTiny, "convnext_tiny")


def _workload(network: type[nn.Module], name: str) -> Workload:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = network()
    return Workload(
        model=model,
        loss_fn=functional.cross_entropy,
        batches=_random_images,
        name=name,
        mini_batch=8,
        optimizer=optim.sgd(lr=0.01, momentum=0.9),
    )


def _random_images(mini_batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        x = torch.randn(mini_batch, 3, SIZE, SIZE, generator=generator)
        yield x, torch.randint(CLASSES, (mini_batch,), generator=generator)
