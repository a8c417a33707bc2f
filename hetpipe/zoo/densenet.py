"""DenseNet (Huang et al., CVPR 2017). The modules have torchvision's names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images

WIDEN = 4  # channels between a layer's two convolutions, per channel that the layer adds


class DenseLayer(nn.Module):
    """Appends `growth` new channels to its input."""

    def __init__(self, inner: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv1 = nn.Conv2d(inner, WIDEN * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(WIDEN * growth)
        self.conv2 = nn.Conv2d(WIDEN * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv1(functional.relu(self.norm1(x)))
        return torch.cat([x, self.conv2(functional.relu(self.norm2(y)))], 1)


class Transition(nn.Sequential):
    """Halves the channels and the size of the images."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inner)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inner, inner // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2, 2)


class DenseNet(nn.Module):
    """(n, 3, size, size) -> (n, classes). `depths` has the number of layers of each block."""

    def __init__(
        self, depths: Sequence[int], growth: int = 32, width: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(3, width, 7, 2, padding=3, bias=False))
        self.features.add_module("norm0", nn.BatchNorm2d(width))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("pool0", nn.MaxPool2d(3, 2, padding=1))
        for number, depth in enumerate(depths, 1):
            if number > 1:
                self.features.add_module(f"transition{number - 1}", Transition(width))
                width //= 2
            layers = [DenseLayer(width + at * growth, growth) for at in range(depth)]
            self.features.add_module(f"denseblock{number}", nn.Sequential(*layers))
            width += depth * growth
        self.features.add_module("norm5", nn.BatchNorm2d(width))
        self.classifier = nn.Linear(width, classes)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.features(x))
        output: torch.Tensor = self.classifier(functional.adaptive_avg_pool2d(y, 1).flatten(1))
        return output


def _densenet(size: int, mini_batch: int, depths: Sequence[int], *sizes: int) -> RandomModel:
    return RandomModel(
        lambda: DenseNet(depths, *sizes), images(size, sizes[-1]), mini_batch,
        optim.sgd(lr=0.1, momentum=0.9, weight_decay=1e-4),
    )  # fmt: skip


MODELS = {
    "densenet121": _densenet(224, 64, (6, 12, 24, 16), 32, 64, 1000),  # 8 M parameters
    "densenet121-small": _densenet(64, 4, (2, 3, 3, 2), 8, 16, 10),
}
