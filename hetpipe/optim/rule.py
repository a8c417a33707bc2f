"""Optimizers as pure functions: `(param, grad, state, step, lr) -> (param', state')`.

Written once in torch operations; capture traces a rule into an update graph for every backend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Update = Callable[
        [torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor],
        tuple[torch.Tensor, tuple[torch.Tensor, ...]],
    ]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer. `update` works on one parameter; `state` names its state tensors.

    Every state tensor has its parameter's shape and dtype and starts at zero. `step` (0-d float32)
    counts updates from 1; `lr` is 0-d float32.
    """

    name: str
    lr: float
    state: tuple[str, ...]
    update: Update
    hyperparameters: tuple[tuple[str, float], ...] = ()
