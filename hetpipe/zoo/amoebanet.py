"""AmoebaNet-D (Real et al., AAAI 2019), as GPipe and DAPPLE train it.

The normal cells form three equal groups. Two reduction cells come before the first group, and one
before each other group. A cell has two inputs and makes five sums. Each sum adds the results of two
operations, which read the inputs or earlier sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hetpipe import optim
from hetpipe.zoo.data import RandomModel, he_weights, images

Operation = Callable[[int, int], nn.Module]
"""Function (channels, stride) -> a module that keeps the number of channels."""
Genotype = Sequence[tuple[int, Operation]]
"""Ten operations, two for each sum, each with the number of the state that the operation reads.
States 0 and 1 are the cell's inputs, later states are the sums."""


class ReluConvNorm(nn.Sequential):
    """ReLU, then a convolution and batch norm."""

    def __init__(
        self, inner: int, outer: int, kernel: int | tuple[int, int], stride: int = 1
    ) -> None:
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (rows // 2, columns // 2)
        super().__init__(
            nn.ReLU(), nn.Conv2d(inner, outer, (rows, columns), stride, padding, bias=False),
            nn.BatchNorm2d(outer),
        )  # fmt: skip


class FactorizedReduce(nn.Module):
    """Halves height and width.

    One 1x1 convolution reads the even positions, another one the odd positions.
    """

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.conv1 = nn.Conv2d(inner, outer // 2, 1, 2, bias=False)
        self.conv2 = nn.Conv2d(inner, outer - outer // 2, 1, 2, bias=False)
        self.bn = nn.BatchNorm2d(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(x)
        odd = nn.functional.pad(x, (0, 1, 0, 1))[:, :, 1:, 1:]
        output: torch.Tensor = self.bn(torch.cat([self.conv1(x), self.conv2(odd)], 1))
        return output


def none(channels: int, stride: int) -> nn.Module:
    """Return a module that passes a state on, and halves its size if the stride is 2."""
    return nn.Identity() if stride == 1 else FactorizedReduce(channels, channels)


def avg_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.AvgPool2d(3, stride, padding=1, count_include_pad=False)


def max_pool_3x3(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(3, stride, padding=1)


def max_pool_2x2(channels: int, stride: int) -> nn.Module:
    return nn.MaxPool2d(2, stride)


def conv_1x1(channels: int, stride: int) -> nn.Module:
    return ReluConvNorm(channels, channels, 1, stride)


def conv_3x3(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    return nn.Sequential(
        ReluConvNorm(channels, narrow, 1), ReluConvNorm(narrow, narrow, 3, stride),
        ReluConvNorm(narrow, channels, 1),
    )  # fmt: skip


def conv_1x7_7x1(channels: int, stride: int) -> nn.Module:
    narrow = channels // 4
    row = nn.Conv2d(narrow, narrow, (1, 7), (1, stride), (0, 3), bias=False)
    column = nn.Conv2d(narrow, narrow, (7, 1), (stride, 1), (3, 0), bias=False)
    return nn.Sequential(
        ReluConvNorm(channels, narrow, 1), nn.ReLU(), row, nn.BatchNorm2d(narrow),
        nn.ReLU(), column, nn.BatchNorm2d(narrow), ReluConvNorm(narrow, channels, 1),
    )  # fmt: skip


NORMAL: Genotype = (
    (1, conv_1x1), (1, max_pool_3x3), (1, none), (0, conv_1x7_7x1), (0, conv_1x1),
    (0, conv_1x7_7x1), (2, max_pool_3x3), (2, none), (1, avg_pool_3x3), (5, conv_1x1),
)  # fmt: skip
NORMAL_ENDS = (0, 3, 4, 6)
REDUCTION: Genotype = (
    (0, max_pool_2x2), (0, max_pool_3x3), (2, none), (1, conv_3x3), (2, conv_1x7_7x1),
    (2, max_pool_3x3), (3, none), (1, max_pool_2x2), (2, avg_pool_3x3), (3, conv_1x1),
)  # fmt: skip
REDUCTION_ENDS = (4, 5, 6)
"""The states that a reduction cell joins as its result; `NORMAL_ENDS` for a normal cell."""


class Cell(nn.Module):
    """(result before the last, last result) of earlier cells -> (last result, new result)."""

    def __init__(
        self, before: int, last: int, channels: int, reduces: bool, last_reduced: bool
    ) -> None:
        super().__init__()
        genotype = REDUCTION if reduces else NORMAL
        self.ends = REDUCTION_ENDS if reduces else NORMAL_ENDS
        self.sources = [source for source, _ in genotype]
        self.fit_last = ReluConvNorm(last, channels, 1)
        self.fit_before: nn.Module = ReluConvNorm(before, channels, 1)
        if last_reduced:
            self.fit_before = FactorizedReduce(before, channels)
        self.operations = nn.ModuleList(
            operation(channels, 2 if reduces and source < 2 else 1)
            for source, operation in genotype
        )
        self.channels = channels * len(self.ends)

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        before, last = pair
        states = [self.fit_last(last), self.fit_before(before)]
        for at in range(0, len(self.sources), 2):
            one, other = self.sources[at : at + 2]
            left = self.operations[at](states[one])
            states.append(left + self.operations[at + 1](states[other]))
        return last, torch.cat([states[end] for end in self.ends], 1)


class AmoebaNet(nn.Module):
    """(n, 3, size, size) -> (n, classes). There are `cells` normal cells, a multiple of 3."""

    def __init__(self, cells: int, filters: int, classes: int = 1000) -> None:
        super().__init__()
        channels = filters // 4
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, 2, padding=1, bias=False), nn.BatchNorm2d(channels)
        )
        third = ["normal"] * (cells // 3)
        kinds = ["reduction"] * 2 + third + ["reduction"] + third + ["reduction"] + third
        before = last = channels
        reduced = False
        modules = []
        for number, kind in enumerate(kinds):
            reduces = kind == "reduction"
            channels *= 2 if reduces else 1
            modules.append(Cell(before, last, channels, reduces, reduced))
            before, last, reduced = last, modules[number].channels, reduces
        self.cells = nn.Sequential(*modules)
        self.fc = nn.Linear(last, classes)
        he_weights(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)
        _, y = self.cells((y, y))
        output: torch.Tensor = self.fc(y.mean((2, 3)))
        return output


def _amoebanet(cells: int, filters: int, size: int, classes: int) -> RandomModel:
    return RandomModel(
        lambda: AmoebaNet(cells, filters, classes), images(size, classes), 4,
        optim.rmsprop(lr=0.01, momentum=0.9),
    )  # fmt: skip


MODELS = {
    "amoebanet36": _amoebanet(36, 512, 224, 1000),  # as in DAPPLE
    "amoebanet36-small": _amoebanet(3, 32, 64, 10),
}
