"""The workload `digits`: a residual CNN on scikit-learn's bundled 8x8 handwritten digits.

Of the 1797 grey images, 1437 are for training and 360 for validation. The network follows He et al.
(CVPR 2016): a stem, two residual blocks at 8x8 and width 64, then three at 4x4 and width 128. The
forward takes 45 MFLOP per sample, nearly all in ten convolutions. Nine of these cost the same, so
the network can be cut almost anywhere into stages of equal cost.

The activation is SiLU, because at ReLU's corner the last bit of a sum decides which gradients flow.
With ReLU, plain torch on one thread and on two threads differs by 3e-2 after 20 steps; with SiLU,
by less than 1e-6.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.errors import HetpipeError
from hetpipe.zoo.data import accuracy_on, seeded, shuffle_batches, skip
from hetpipe.zoo.workload import Workload

SPLIT_SEED = 0
VALIDATION = 360


class Block(nn.Module):
    """conv-bn-silu-conv-bn plus the skip, then silu.

    (n, inner, h, w) -> (n, outer, h / stride, w / stride)
    """

    def __init__(self, inner: int, outer: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.act1 = nn.SiLU()
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.act2 = nn.SiLU()
        self.shortcut = skip(inner, outer, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act1(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        output: torch.Tensor = self.act2(y + self.shortcut(x))
        return output


class DigitsNet(nn.Sequential):
    """(n, 1, 8, 8) grey images -> (n, 10) logits."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 64, 3, padding=1, bias=False),
            nn.BatchNorm2d(64),
            nn.SiLU(),
            Block(64, 64),
            Block(64, 64),
            Block(64, 128, stride=2),
            Block(128, 128),
            Block(128, 128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, 10),
        )


def load_digits(seed: int = SPLIT_SEED) -> tuple[torch.Tensor, ...]:
    """Return x and y for training, then x and y for validation.

    x is (1437, 1, 8, 8) for training and (360, 1, 8, 8) for validation; y has one label per image.
    Pixels are scaled to mean 0 and deviation 1 over the training set. Raises `HetpipeError` without
    scikit-learn.
    """
    try:
        from sklearn import datasets
    except ImportError as error:
        raise HetpipeError(
            "the workload 'digits' needs scikit-learn: pip install 'hetpipe[bench]'"
        ) from error
    bunch = datasets.load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, kept = order[:VALIDATION], order[VALIDATION:]
    x = (x - x[kept].mean()) / x[kept].std()
    return x[kept], y[kept], x[held], y[held]


def workload() -> Workload:
    x, y, x_held, y_held = load_digits()
    return Workload(
        model=seeded(DigitsNet),
        loss_fn=functional.cross_entropy,
        batches=shuffle_batches(x, y),
        name="digits",
        mini_batch=256,
        optimizer=optim.sgd(lr=0.05, momentum=0.9),
        validate=accuracy_on(x_held, y_held),
        train_samples=len(x),
    )
