"""Data sets in memory: an endless, seeded stream of mini-batches, and the accuracy of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetpipe.errors import HetpipeError

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
    """Return `validate(model)`, which returns the accuracy in eval mode.

    The accuracy is the share of samples whose largest logit is at the label.
    """

    def validate(model: torch.nn.Module) -> dict[str, float]:
        with eval_mode(model):
            hits = model(x).argmax(dim=1) == y
        return {"accuracy": float(hits.float().mean())}

    return validate


@contextmanager
def eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Put the model into eval mode without gradients; on exit each module gets its mode back.

    Parts of a model may be in eval mode on purpose, for instance a frozen backbone.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:  # not by train(), which models may override
            module.training = training
