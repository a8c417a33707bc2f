"""The workload `mlp`, which is quick to run: six small linear layers on ten clouds of points."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

from hetpipe import optim
from hetpipe.zoo.data import accuracy_on, shuffle_batches
from hetpipe.zoo.workload import Workload

CLASSES = 10
FEATURES = 32
WIDTH = 128


def workload() -> Workload:
    """Return the workload: 2048 points of Gaussian clouds for training, 512 for validation."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (2560,), generator=generator)
    x = centres[y] + torch.randn(len(y), FEATURES, generator=generator)
    widths = [FEATURES, *[WIDTH] * 5]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = [
            part
            for inner, outer in pairwise(widths)
            for part in (nn.Linear(inner, outer), nn.ReLU())
        ]
        model = nn.Sequential(*hidden, nn.Linear(WIDTH, CLASSES))
    return Workload(
        model=model,
        loss_fn=functional.cross_entropy,
        batches=shuffle_batches(x[:2048], y[:2048]),
        name="mlp",
        mini_batch=128,
        optimizer=optim.sgd(lr=0.05, momentum=0.9),
        validate=accuracy_on(x[2048:], y[2048:]),
        train_samples=2048,
    )
