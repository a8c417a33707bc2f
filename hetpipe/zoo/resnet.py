"""ResNet (He et al., CVPR 2016). The modules have torchvision's names.

PipeDream and DAPPLE train ResNet-50 with mini-batches of 128 per device. PipeOptim trains
ResNet-101 for 200 classes with images of 224 x 224 (Tiny ImageNet, scaled up).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images, skip

EXPANSION = 4  # output channels of a bottleneck over its inner channels


class BasicBlock(nn.Module):
    """Two convolutions and the skip, which a 1x1 convolution adapts to a new shape."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.downsample = skip(inner, outer, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        output: torch.Tensor = self.relu(y + self.downsample(x))
        return output


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, and the skip as in `BasicBlock`."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = EXPANSION * width
        self.conv1 = nn.Conv2d(inner, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outer, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = skip(inner, outer, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        output: torch.Tensor = self.relu(y + self.downsample(x))
        return output


class ResNet(nn.Module):
    """(n, 3, size, size) -> (n, classes). `depths` has the number of blocks of each layer."""

    def __init__(
        self, depths: Sequence[int], width: int = 64, classes: int = 1000, deep: bool = True
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        channels = width
        for number, depth in enumerate(depths):
            inner = width * 2**number
            outer = EXPANSION * inner if deep else inner
            blocks: list[nn.Module] = []
            for at in range(depth):
                stride = 2 if number and not at else 1
                block = Bottleneck if deep else BasicBlock
                blocks.append(block(channels, inner, stride))
                channels = outer
            self.add_module(f"layer{number + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, classes)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for name, layer in self.named_children():
            if name.startswith("layer"):
                y = layer(y)
        output: torch.Tensor = self.fc(self.avgpool(y).flatten(1))
        return output


SGD = optim.sgd(lr=0.1, momentum=0.9, weight_decay=1e-4)


def _published(depths: Sequence[int], classes: int, deep: bool = True) -> RandomModel:
    network = partial(ResNet, depths, classes=classes, deep=deep)
    return RandomModel(network, images(224, classes), 128, SGD)


def _small(depths: Sequence[int], deep: bool = True) -> RandomModel:
    return RandomModel(lambda: ResNet(depths, 16, 10, deep), images(64, 10), 4, SGD)


MODELS = {
    "resnet18": _published((2, 2, 2, 2), 1000, deep=False),  # 12 M parameters
    "resnet18-small": _small((2, 2, 2, 2), deep=False),
    "resnet50": _published((3, 4, 6, 3), 1000),  # 26 M
    "resnet50-small": _small((2, 2, 2, 2)),
    "resnet101": _published((3, 4, 23, 3), 200),  # 43 M
    "resnet101-small": _small((1, 2, 4, 1)),
}
