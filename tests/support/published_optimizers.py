"""Lion and LAMB in numpy in float64, with the part of torch.optim's interface that tests use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]


class InFloat64:
    """Reads the parameters' `grad`, updates its copies of the weights, and writes them back."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = parameters
        self.weights = [p.detach().numpy().astype(np.float64) for p in parameters]
        self.m = [np.zeros_like(w) for w in self.weights]
        self.v = [np.zeros_like(w) for w in self.weights]
        self.t = 0

    def step(self) -> None:
        self.t += 1
        for i, parameter in enumerate(self.parameters):
            assert parameter.grad is not None
            self.one(i, parameter.grad.numpy().astype(np.float64))
            parameter.data.copy_(torch.from_numpy(self.weights[i]))

    def one(self, i: int, g: Array) -> None:
        raise NotImplementedError


class Lion(InFloat64):
    def __init__(self, parameters: Any, lr: float, betas: Any, decay: float) -> None:
        super().__init__(parameters)
        self.lr, self.betas, self.decay = lr, betas, decay

    def one(self, i: int, g: Array) -> None:
        (b1, b2), x = self.betas, self.weights[i]
        c = b1 * self.m[i] + (1 - b1) * g
        self.weights[i] = x - self.lr * (np.sign(c) + self.decay * x)
        self.m[i] = b2 * self.m[i] + (1 - b2) * g


class Lamb(InFloat64):
    def __init__(self, parameters: Any, lr: float, betas: Any, eps: float, decay: float) -> None:
        super().__init__(parameters)
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay

    def one(self, i: int, g: Array) -> None:
        (b1, b2), x = self.betas, self.weights[i]
        self.m[i] = b1 * self.m[i] + (1 - b1) * g
        self.v[i] = b2 * self.v[i] + (1 - b2) * g**2
        m, v = self.m[i] / (1 - b1**self.t), self.v[i] / (1 - b2**self.t)
        r = m / (np.sqrt(v) + self.eps) + self.decay * x
        ratio = np.linalg.norm(x) / np.linalg.norm(r) if x.any() and r.any() else 1.0
        self.weights[i] = x - self.lr * ratio * r
