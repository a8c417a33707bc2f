"""VGG (Simonyan and Zisserman, ICLR 2015) and AlexNet (Krizhevsky, 2014: one tower).

The modules have torchvision's names. PipeDream trains VGG-16 with mini-batches of 64 per device and
AlexNet with 256; DAPPLE trains VGG-19 with 32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images

VGG11 = (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0)
VGG16 = (64, 64, 0, 128, 128, 0, *(256,) * 3, 0, *(512,) * 3, 0, *(512,) * 3, 0)
VGG19 = (64, 64, 0, 128, 128, 0, *(256,) * 4, 0, *(512,) * 4, 0, *(512,) * 4, 0)
"""Output channels of each 3x3 convolution; 0 is a pooling."""
NARROW = 8  # a small network has 1 / NARROW of the channels


class VGG(nn.Module):
    """(n, 3, size, size) -> (n, classes); linear layers read features at grid x grid positions."""

    def __init__(
        self, widths: Sequence[int], grid: int = 7, hidden: int = 4096, classes: int = 1000
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in widths:
            if width:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            else:
                layers.append(nn.MaxPool2d(2, 2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(channels * grid * grid, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return output


class AlexNet(nn.Module):
    """(n, 3, 224, 224) -> (n, classes)."""

    def __init__(
        self,
        widths: Sequence[int] = (64, 192, 384, 256, 256),
        hidden: int = 4096,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        a, b, c, d, e = widths
        self.features = nn.Sequential(
            nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(c, d, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(d, e, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.avgpool = nn.AdaptiveAvgPool2d(6)
        self.classifier = nn.Sequential(
            nn.Dropout(), nn.Linear(36 * e, hidden), nn.ReLU(inplace=True),
            nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return output


SGD = optim.sgd(lr=0.01, momentum=0.9, weight_decay=5e-4)


def _vgg(widths: Sequence[int], mini_batch: int) -> RandomModel:
    return RandomModel(lambda: VGG(widths), images(224, 1000), mini_batch, SGD)


def _small(widths: Sequence[int]) -> RandomModel:
    narrow = [width // NARROW for width in widths]
    return RandomModel(lambda: VGG(narrow, 2, 64, 10), images(64, 10), 4, SGD)


MODELS = {
    "alexnet": RandomModel(AlexNet, images(224, 1000), 256, SGD),  # 61 M parameters
    "alexnet-small": RandomModel(
        lambda: AlexNet((8, 24, 48, 32, 32), 64, 10), images(224, 10), 4, SGD
    ),
    "vgg11": _vgg(VGG11, 64),  # 133 M parameters
    "vgg11-small": _small(VGG11),
    "vgg16": _vgg(VGG16, 64),  # 138 M
    "vgg16-small": _small(VGG16),
    "vgg19": _vgg(VGG19, 32),  # 144 M
    "vgg19-small": _small(VGG19),
}
