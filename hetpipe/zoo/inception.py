"""GoogLeNet (Szegedy et al., CVPR 2015) and Inception-V3 (CVPR 2016), with batch norm.

The larger modules have torchvision's names. Both networks have auxiliary classifiers, whose losses
are added with the papers' weights. `narrow` divides the numbers of channels. PipeOptim trains
GoogLeNet for 100 classes and Inception-V3 for 200.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images


class BasicConv2d(nn.Module):
    """A convolution, then batch norm and ReLU."""

    def __init__(self, inner: int, outer: int, kernel: Any, **options: Any) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inner, outer, kernel, bias=False, **options)
        self.bn = nn.BatchNorm2d(outer, eps=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.bn(self.conv(x)), inplace=True)


def chain(inner: int, *layers: tuple[int, Any, Any]) -> nn.Sequential:
    """Return convolutions one after another, each given as (channels, kernel, padding)."""
    modules = []
    for outer, kernel, padding in layers:
        modules.append(BasicConv2d(inner, outer, kernel, padding=padding))
        inner = outer
    return nn.Sequential(*modules)


class Branches(nn.Module):
    """Branches that read the same input; their outputs are joined by channel."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Fork(nn.Module):
    """A trunk, then two branches that both read the trunk's result."""

    def __init__(self, trunk: nn.Module, one: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.trunk, self.fork = trunk, Branches(one, other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.fork(self.trunk(x))
        return output


def inception(inner: int, widths: Sequence[int]) -> Branches:
    """Return a module of GoogLeNet; `widths` has the channels of its convolutions, in order.

    The four branches have convolutions of 1x1; 1x1 and 3x3; 1x1 and 3x3; 1x1 after a pooling.
    """
    a, b0, b1, c0, c1, d = widths
    pooled = nn.Sequential(nn.MaxPool2d(3, 1, padding=1), BasicConv2d(inner, d, 1))
    return Branches(
        BasicConv2d(inner, a, 1), chain(inner, (b0, 1, 0), (b1, 3, 1)),
        chain(inner, (c0, 1, 0), (c1, 3, 1)), pooled,
    )  # fmt: skip


class GoogLeNetAuxiliary(nn.Module):
    """An auxiliary classifier, which reads features from inside the network."""

    def __init__(self, inner: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.conv = BasicConv2d(inner, width, 1)
        self.fc1 = nn.Linear(16 * width, hidden)
        self.fc2 = nn.Linear(hidden, classes)
        self.dropout = nn.Dropout(0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(functional.adaptive_avg_pool2d(x, 4)).flatten(1)
        output: torch.Tensor = self.fc2(self.dropout(functional.relu(self.fc1(y))))
        return output


MODULES = {
    "3a": (64, 96, 128, 16, 32, 32), "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64), "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64), "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128), "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}  # fmt: skip


class GoogLeNet(nn.Module):
    """(n, 3, 224, 224) -> logits (n, classes) of the network and of two auxiliary classifiers."""

    def __init__(self, classes: int = 100, narrow: int = 1) -> None:
        super().__init__()
        self.conv1 = BasicConv2d(3, 64 // narrow, 7, stride=2, padding=3)
        self.conv2 = BasicConv2d(64 // narrow, 64 // narrow, 1)
        self.conv3 = BasicConv2d(64 // narrow, 192 // narrow, 3, padding=1)
        self.maxpool = nn.MaxPool2d(3, 2, ceil_mode=True)
        inner, hidden = 192 // narrow, 1024 // narrow
        for name, full in MODULES.items():
            widths = [width // narrow for width in full]
            self.add_module(f"inception{name}", inception(inner, widths))
            inner = widths[0] + widths[2] + widths[4] + widths[5]
            if name in ("4a", "4d"):
                classifier = GoogLeNetAuxiliary(inner, 128 // narrow, hidden, classes)
                self.add_module("aux1" if name == "4a" else "aux2", classifier)
        self.dropout = nn.Dropout(0.2)
        self.fc = nn.Linear(inner, classes)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.maxpool(self.conv1(x))
        y = self.maxpool(self.conv3(self.conv2(y)))
        auxiliary = []
        for name in MODULES:
            y = self.get_submodule(f"inception{name}")(y)
            if name in ("4a", "4d"):
                classifier = self.get_submodule("aux1" if name == "4a" else "aux2")
                auxiliary.append(classifier(y))
            if name == "3b":
                y = self.maxpool(y)
            elif name == "4e":
                y = functional.max_pool2d(y, 2, 2)
        logits = self.fc(self.dropout(functional.adaptive_avg_pool2d(y, 1).flatten(1)))
        return (logits, *auxiliary)


class InceptionV3(nn.Module):
    """(n, 3, 299, 299) -> logits (n, classes) of the network and of an auxiliary classifier.

    Without `repeats` the network has one module of each kind, for images of 147 x 147.
    """

    def __init__(self, classes: int = 200, narrow: int = 1, repeats: bool = True) -> None:
        super().__init__()

        def w(width: int) -> int:
            return width // narrow

        self.stem = nn.Sequential(
            BasicConv2d(3, w(32), 3, stride=2), BasicConv2d(w(32), w(32), 3),
            BasicConv2d(w(32), w(64), 3, padding=1), nn.MaxPool2d(3, 2),
            BasicConv2d(w(64), w(80), 1), BasicConv2d(w(80), w(192), 3), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        self.Mixed_5b = _mixed_5(w(192), w, 32)
        if repeats:
            self.Mixed_5c = _mixed_5(w(256), w, 64)
            self.Mixed_5d = _mixed_5(w(288), w, 64)
        middle = w(288) if repeats else w(256)
        self.Mixed_6a = _mixed_6a(middle, w)
        inner = w(384) + w(96) + middle
        for letter, width in zip("bcde" if repeats else "b", (128, 160, 160, 192), strict=False):
            self.add_module(f"Mixed_6{letter}", _mixed_6(inner, w(width), w(192)))
            inner = w(768)
        self.AuxLogits = nn.Sequential(
            nn.AvgPool2d(5, 3) if repeats else nn.AvgPool2d(3, 1), BasicConv2d(inner, w(128), 1),
            BasicConv2d(w(128), w(768), 5), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(w(768), classes),
        )  # fmt: skip
        self.Mixed_7a = _mixed_7a(inner, w)
        self.Mixed_7b = _mixed_7(w(320) + w(192) + inner, w)
        if repeats:
            self.Mixed_7c = _mixed_7(w(2048), w)
        self.dropout = nn.Dropout()
        self.fc = nn.Linear(w(2048), classes)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.stem(x)
        auxiliary = y
        for name, module in self.named_children():
            if name == "Mixed_7a":
                auxiliary = self.AuxLogits(y)
            if name.startswith("Mixed"):
                y = module(y)
        return self.fc(self.dropout(y.mean((2, 3)))), auxiliary


def _pooled(inner: int, outer: int) -> nn.Sequential:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), BasicConv2d(inner, outer, 1))


def _mixed_5(inner: int, w: Any, pooled: int) -> Branches:
    return Branches(
        BasicConv2d(inner, w(64), 1), chain(inner, (w(48), 1, 0), (w(64), 5, 2)),
        chain(inner, (w(64), 1, 0), (w(96), 3, 1), (w(96), 3, 1)), _pooled(inner, w(pooled)),
    )  # fmt: skip


def _mixed_6a(inner: int, w: Any) -> Branches:
    deep = chain(inner, (w(64), 1, 0), (w(96), 3, 1))
    deep.append(BasicConv2d(w(96), w(96), 3, stride=2))
    return Branches(BasicConv2d(inner, w(384), 3, stride=2), deep, nn.MaxPool2d(3, 2))


def _mixed_6(inner: int, c: int, outer: int) -> Branches:
    row, column = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    return Branches(
        BasicConv2d(inner, outer, 1),
        chain(inner, (c, 1, 0), (c, *row), (outer, *column)),
        chain(inner, (c, 1, 0), (c, *column), (c, *row), (c, *column), (outer, *row)),
        _pooled(inner, outer),
    )


def _mixed_7a(inner: int, w: Any) -> Branches:
    one = chain(inner, (w(192), 1, 0)).append(BasicConv2d(w(192), w(320), 3, stride=2))
    other = chain(inner, (w(192), 1, 0), (w(192), (1, 7), (0, 3)), (w(192), (7, 1), (3, 0)))
    other.append(BasicConv2d(w(192), w(192), 3, stride=2))
    return Branches(one, other, nn.MaxPool2d(3, 2))


def _mixed_7(inner: int, w: Any) -> Branches:
    def split(trunk: nn.Module) -> Fork:
        row = BasicConv2d(w(384), w(384), (1, 3), padding=(0, 1))
        return Fork(trunk, row, BasicConv2d(w(384), w(384), (3, 1), padding=(1, 0)))

    return Branches(
        BasicConv2d(inner, w(320), 1), split(chain(inner, (w(384), 1, 0))),
        split(chain(inner, (w(448), 1, 0), (w(384), 3, 1))), _pooled(inner, w(192)),
    )  # fmt: skip


def auxiliary_loss(weight: float, logits: Sequence[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    """Return the first logits' cross entropy plus `weight` times each other cross entropy."""
    loss, *others = (functional.cross_entropy(each, y) for each in logits)
    for other in others:
        loss = loss + weight * other
    return loss


def _googlenet(size: int, mini_batch: int, *sizes: int) -> RandomModel:
    return RandomModel(
        lambda: GoogLeNet(*sizes), images(size, sizes[0]), mini_batch, optim.adamw(lr=1e-3),
        partial(auxiliary_loss, 0.3),
    )  # fmt: skip


def _inception(size: int, mini_batch: int, classes: int, narrow: int = 1) -> RandomModel:
    return RandomModel(
        lambda: InceptionV3(classes, narrow, narrow == 1), images(size, classes), mini_batch,
        optim.sgd(lr=0.01, momentum=0.9, weight_decay=5e-4), partial(auxiliary_loss, 0.4),
    )  # fmt: skip


MODELS = {
    "googlenet": _googlenet(224, 64, 100),  # 10 M parameters, with both auxiliary classifiers
    "googlenet-small": _googlenet(224, 4, 10, 8),
    "inception-v3": _inception(299, 64, 200),  # 25 M, with its auxiliary classifier
    "inception-v3-small": _inception(147, 4, 10, 8),  # a module of each kind
}
