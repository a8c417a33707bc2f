"""Functions of random operators and views, for tests of programs that write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Unary = Callable[[torch.Tensor], torch.Tensor]


def random_function(
    generator: np.random.Generator, calls: int, binary: Sequence[Binary], unary: Sequence[Unary]
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Return a function of tensors, whose results are the last three of `calls` values."""
    choices = generator.integers(0, 1 << 30, (calls, 3))

    def fn(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values: list[Any] = list(inputs)
        for kind, i, j in choices:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind % 3:
                values.append(binary[kind % len(binary)](a, b))
            else:
                values.append(unary[kind % len(unary)](a))
        return tuple(values[-3:])

    return fn
