"""MobileNet-V3, large (Howard et al., ICCV 2019)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images

Row = tuple[int, int, int, bool, bool, int]
"""A block: kernel, inner and outer channels, whether it has squeeze-and-excitation, whether its
activation is hard swish rather than ReLU, and stride."""

LARGE: tuple[Row, ...] = (
    (3, 16, 16, False, False, 1), (3, 64, 24, False, False, 2), (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2), (5, 120, 40, True, False, 1), (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2), (3, 200, 80, False, True, 1), (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1), (3, 480, 112, True, True, 1), (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2), (5, 960, 160, True, True, 1), (5, 960, 160, True, True, 1),
)  # fmt: skip
SMALL: tuple[Row, ...] = (
    (3, 16, 16, False, False, 1), (3, 32, 24, False, False, 2), (5, 36, 24, True, False, 2),
    (3, 48, 32, False, True, 2), (5, 64, 32, True, True, 1),
)  # fmt: skip


class ConvNormActivation(nn.Sequential):
    """A convolution, batch norm, and the activation unless it is None."""

    def __init__(
        self, inner: int, outer: int, kernel: int, stride: int = 1, groups: int = 1,
        activation: type[nn.Module] | None = None,
    ) -> None:  # fmt: skip
        layers: list[nn.Module] = [
            nn.Conv2d(inner, outer, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outer, eps=1e-3, momentum=0.01),
        ]
        super().__init__(*layers, *([activation()] if activation else []))


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor; a small network computes the factors from channel means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = _divisible(channels // 4)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, narrow, 1)
        self.activation = nn.ReLU()
        self.fc2 = nn.Conv2d(narrow, channels, 1)
        self.scale_activation = nn.Hardsigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.fc2(self.activation(self.fc1(self.avgpool(x))))
        output: torch.Tensor = self.scale_activation(scale) * x
        return output


class InvertedResidual(nn.Module):
    """Widens, convolves each channel, narrows, and adds the block's input if the shapes agree."""

    def __init__(self, before: int, row: Row) -> None:
        super().__init__()
        kernel, inner, outer, squeezes, hard, stride = row
        activation = nn.Hardswish if hard else nn.ReLU
        layers: list[nn.Module] = []
        if inner != before:
            layers.append(ConvNormActivation(before, inner, 1, activation=activation))
        layers.append(ConvNormActivation(inner, inner, kernel, stride, inner, activation))
        if squeezes:
            layers.append(SqueezeExcitation(inner))
        layers.append(ConvNormActivation(inner, outer, 1))
        self.block = nn.Sequential(*layers)
        self.skips = stride == 1 and before == outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return x + y if self.skips else y


class MobileNetV3(nn.Module):
    """(n, 3, size, size) -> (n, classes)."""

    def __init__(self, rows: Sequence[Row], hidden: int = 1280, classes: int = 1000) -> None:
        super().__init__()
        channels = rows[0][1]
        layers: list[nn.Module] = [ConvNormActivation(3, channels, 3, 2, 1, nn.Hardswish)]
        for row in rows:
            layers.append(InvertedResidual(channels, row))
            channels = row[2]
        layers.append(ConvNormActivation(channels, 6 * channels, 1, activation=nn.Hardswish))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * channels, hidden), nn.Hardswish(), nn.Dropout(0.2),
            nn.Linear(hidden, classes),
        )  # fmt: skip
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.classifier(self.avgpool(self.features(x)).flatten(1))
        return output


def _divisible(channels: int) -> int:
    """Return the nearest multiple of 8; if this is below 0.9 `channels`, the next multiple."""
    near = max(8, (channels + 4) // 8 * 8)
    return near if near >= 0.9 * channels else near + 8


def _mobilenet(size: int, mini_batch: int, rows: Sequence[Row], *sizes: int) -> RandomModel:
    return RandomModel(
        lambda: MobileNetV3(rows, *sizes), images(size, sizes[-1]), mini_batch,
        optim.rmsprop(lr=0.01, momentum=0.9, weight_decay=1e-5),
    )  # fmt: skip


MODELS = {
    "mobilenet-v3": _mobilenet(224, 128, LARGE, 1280, 1000),  # 5 M parameters
    "mobilenet-v3-small": _mobilenet(64, 4, SMALL, 64, 10),
}
