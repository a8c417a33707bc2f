"""A workload: a model with its loss and data, which commands load by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from hetpipe.optim.rule import Optimizer

    Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Workload:
    """A model with its loss and data.

    `batches(mini_batch, seed)` yields (x, y) for ever, the same sequence for the same seed.
    `validate(model)` returns the validation figures of an eager model, for instance {"accuracy":
    0.97}; `validate` is None without validation data. `blocks` names the modules before which
    torch's own pipeline may cut the model, in order; it may be empty.
    """

    model: torch.nn.Module
    loss_fn: Callable[[Any, Any], Any]
    batches: Callable[[int, int], Iterator[Batch]]
    name: str = "workload"
    mini_batch: int = 128
    optimizer: Optimizer | None = None  # None: the command chooses one
    validate: Callable[[torch.nn.Module], dict[str, float]] | None = None
    train_samples: int | None = None  # number of samples in an epoch, if the data have epochs
    blocks: tuple[str, ...] = ()
