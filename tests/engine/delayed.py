"""What asynchronous training must give: one loop with explicit old versions, in float64.

A network of linear layers and tanh, its passes written out by hand, because a forward and the
backward of the same mini-batch may use different weights. W[t] are the weights after t updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

WIDTHS = (6, 8, 8, 8, 3)
SAMPLES = 4


class Layer(NamedTuple):
    """Weight and bias of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor


def network(seed: int = 0) -> nn.Sequential:
    """A linear layer, with its tanh, is a stage at most."""
    torch.manual_seed(seed)
    parts: list[nn.Module] = []
    for wide, narrow in pairwise(WIDTHS):
        parts.append(nn.Sequential(nn.Linear(wide, narrow), nn.Tanh()))
    return nn.Sequential(*parts).double()


def loss_fn(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().sum(1).mean()


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    x = torch.randn(SAMPLES, WIDTHS[0], generator=generator, dtype=torch.float64)
    return x, torch.tanh(x[:, : WIDTHS[-1]] * 2)


class Momentum:
    """SGD with momentum."""

    def __init__(self, lr: float, momentum: float = 0.9) -> None:
        self.lr, self.momentum = lr, momentum

    def start(self, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(w),)

    def update(self, w, state, grad, step):
        m = self.momentum * state[0] + grad
        return w - self.lr * m, (m,)

    def predict(self, w, state, step, ahead):
        return w - self.lr * ahead * state[0]


class Adam:
    """Adam, and AdamW with decay."""

    def __init__(self, lr: float, decay: float = 0.0) -> None:
        self.lr, self.decay = lr, decay

    def start(self, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.zeros_like(w), torch.zeros_like(w))

    def update(self, w, state, grad, step):
        m, v = 0.9 * state[0] + 0.1 * grad, 0.999 * state[1] + 0.001 * grad**2
        return w * (1 - self.lr * self.decay) - self.lr * self._direction((m, v), step), (m, v)

    def predict(self, w, state, step, ahead):
        return w - self.lr * ahead * self._direction(state, step)

    def _direction(self, state, step):
        m, v = state
        return m / (1 - 0.9**step) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)


class History(NamedTuple):
    """Weights of every layer, and the optimizer's state of them, after t updates."""

    weights: list[list[Layer]]
    states: list[list[tuple[tuple[torch.Tensor, ...], ...]]]


Choice = Callable[[int, int], tuple[int, float]]
"""(stage, mini-batch) -> which W[t], and how many updates to predict from there."""


def train(
    stages: int,
    optimizer: Momentum | Adam,
    forward: Choice,
    backward: Choice,
    mini_batches: int,
    microbatches: int = 1,
) -> History:
    """W after every update; each stage has an equal share of the layers."""
    layers = [part[0] for part in network()]
    history = [[Layer(p.weight.detach().clone(), p.bias.detach().clone()) for p in layers]]
    states = [[tuple(map(optimizer.start, layer)) for layer in history[0]]]
    cuts = [len(layers) * n // stages for n in range(stages + 1)]
    stage_of = [n for n in range(stages) for _ in range(cuts[n], cuts[n + 1])]

    def chosen(choice: Choice, b: int) -> list[Layer]:
        found = []
        for index, n in enumerate(stage_of):
            t, ahead = choice(n, b)
            pairs = zip(history[t][index], states[t][index], strict=True)
            found.append(
                Layer(*(optimizer.predict(w, s, t, ahead) if t and ahead else w for w, s in pairs))
            )
        return found

    for b in range(mini_batches):
        x, y = batch(b)
        ahead, back = chosen(forward, b), chosen(backward, b)
        grads = [Layer(torch.zeros_like(w), torch.zeros_like(c)) for w, c in history[0]]
        for part, wanted in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            _pass(part, wanted, ahead, back, grads)
        new, state = [], []
        for layer, old, grad in zip(history[-1], states[-1], grads, strict=True):
            moved = [
                optimizer.update(w, s, g, b + 1) for w, s, g in zip(layer, old, grad, strict=True)
            ]
            new.append(Layer(*(w for w, _ in moved)))
            state.append(tuple(s for _, s in moved))
        history.append(new)
        states.append(state)
    return History(history, states)


def _pass(
    x: torch.Tensor,
    wanted: torch.Tensor,
    ahead: Sequence[Layer],
    back: Sequence[Layer],
    grads: Sequence[Layer],
) -> None:
    """Forward with the weights `ahead`, backward with `back`; adds to `grads`."""
    entered, left = [], []
    for weight, bias in ahead:
        entered.append(x)
        x = torch.tanh(x @ weight.t() + bias)
        left.append(x)
    slope = 2 * (x - wanted) / SAMPLES
    for index in reversed(range(len(back))):
        slope = slope * (1 - left[index] ** 2)
        grads[index].weight.add_(slope.t() @ entered[index])
        grads[index].bias.add_(slope.sum(0))
        slope = slope @ back[index].weight
