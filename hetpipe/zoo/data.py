"""Data of workloads, in memory or drawn at random; also accuracy, losses and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer
from hetpipe.zoo.workload import Workload

Batches = Callable[[int, int], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def shuffle_batches(x: torch.Tensor, y: torch.Tensor) -> Batches:
    """Return `batches(mini_batch, seed)`, which yields the samples in a new order each epoch.

    An incomplete last mini-batch is dropped. `batches` raises `HetpipeError` if a mini-batch is
    empty or larger than the data set.
    """

    def batches(mini_batch: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        if not 1 <= mini_batch <= len(x):
            raise HetpipeError(
                f"a mini-batch has {mini_batch} samples, the data set has {len(x)}: "
                f"choose 1 to {len(x)}"
            )
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(x), generator=generator)
            for lo in range(0, len(x) - mini_batch + 1, mini_batch):
                rows = order[lo : lo + mini_batch]
                yield x[rows], y[rows]

    return batches


def accuracy_on(x: torch.Tensor, y: torch.Tensor) -> Callable[[torch.nn.Module], dict[str, float]]:
    """Return `validate(model)`, which returns the accuracy in eval mode."""

    def validate(model: torch.nn.Module) -> dict[str, float]:
        with eval_mode(model):
            hits = model(x).argmax(dim=1) == y
        return {"accuracy": float(hits.float().mean())}

    return validate


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients; on exit, restore the mode of each module.

    Some modules may be in eval mode on purpose, for instance a frozen backbone.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:  # not by train(), which models may override
            module.training = training


def seeded(network: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return a new network, with random weights from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network()


Draw = Callable[[int, torch.Generator], tuple[Any, Any]]
"""Function (samples, generator) -> (x, y), a mini-batch."""


@dataclass(frozen=True)
class RandomModel:
    """A network with its loss, its optimizer, and a function that draws its mini-batches."""

    network: Callable[[], nn.Module]
    draw: Draw
    mini_batch: int
    optimizer: Optimizer
    loss_fn: Callable[[Any, Any], Any] = functional.cross_entropy

    def workload(self, name: str) -> Workload:
        """Return a workload with this name, and with weights from a fixed seed."""

        def batches(samples: int, seed: int) -> Iterator[tuple[Any, Any]]:
            generator = torch.Generator().manual_seed(seed)
            while True:
                yield self.draw(samples, generator)

        model = seeded(self.network)
        return Workload(model, self.loss_fn, batches, name, self.mini_batch, self.optimizer)


def images(size: int, classes: int) -> Draw:
    """Return a function that draws normal noise (n, 3, size, size) and a class for each image."""

    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(samples, 3, size, size, generator=generator)
        return x, torch.randint(classes, (samples,), generator=generator)

    return draw


def language(vocabulary: int, length: int) -> Draw:
    """Return a function that draws tokens (n, length), and the token after each of these tokens."""

    def draw(samples: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(vocabulary, (samples, length + 1), generator=generator)
        return tokens[:, :-1].clone(), tokens[:, 1:].clone()

    return draw


def translation(vocabulary: int, source: int, target: int) -> Draw:
    """Return a function that draws x: tokens (n, source) and (n, target); and y: the next targets.

    y (n, target) has the token after each token of the target.
    """
    following = language(vocabulary, target)

    def draw(samples: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        first = torch.randint(vocabulary, (samples, source), generator=generator)
        so_far, following_ones = following(samples, generator)
        return (first, so_far), following_ones

    return draw


def spans(vocabulary: int, length: int) -> Draw:
    """Return a function that draws x: tokens and a mask, (n, length) each; and y: answers (n, 2).

    The mask is 1 for tokens and 0 for padding. As in SQuAD, an answer is given by the positions of
    its first and last token.
    """

    def draw(samples: int, generator: torch.Generator) -> tuple[Any, torch.Tensor]:
        tokens = torch.randint(vocabulary, (samples, length), generator=generator)
        lengths = torch.randint(length // 2, length + 1, (samples, 1), generator=generator)
        mask = (torch.arange(length) < lengths).long()
        return (tokens, mask), torch.randint(length // 2, (samples, 2), generator=generator)

    return draw


def span_loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of an answer's ends: logits (n, length, 2), y (n, 2)."""
    first = functional.cross_entropy(logits[..., 0], y[:, 0])
    last = functional.cross_entropy(logits[..., 1], y[:, 1])
    return 0.5 * (first + last)


def skip(inner: int, outer: int, stride: int) -> nn.Module:
    """Return a residual block's skip: a 1x1 convolution with batch norm if the shape changes."""
    if stride == 1 and inner == outer:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))


def he_weights(model: nn.Module) -> None:
    """Draw weights of convolutions for rectifiers (He et al., ICCV 2015); set biases to 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
