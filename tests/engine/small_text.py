"""A workload small enough for tests, with every kind of layer that `gpt` has."""

from __future__ import annotations

import torch

from hetpipe import optim
from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.text import language, token_loss
from hetpipe.zoo.workload import Workload

LENGTH = 8


def workload() -> Workload:
    """Return a language model with four blocks of width 16."""
    batches, validate, samples = language(LENGTH)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT(length=LENGTH, width=16, heads=2)
    return Workload(
        model, token_loss, batches, "small text", 16, optim.adamw(lr=1e-2), validate, samples,
        blocks=tuple(f"blocks.{index}" for index in range(4)),
    )  # fmt: skip


def broken() -> Workload:
    """Raise an error where a workload is expected."""
    raise RuntimeError("broken on purpose")
