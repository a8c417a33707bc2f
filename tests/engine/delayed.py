"""Asynchronous training as one float64 loop with explicit old versions of the weights.

The network has linear layers and tanh. Its passes are written out by hand, because the forward and
the backward of one mini-batch may use different weights. W[t] are the weights after t updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from captures import shared
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured

WIDTHS = (6, 8, 8, 8, 3)
SAMPLES = 4
MINI_BATCHES = 30


class Layer(NamedTuple):
    """Weight and bias of a linear layer."""

    weight: torch.Tensor
    bias: torch.Tensor


def network(seed: int = 0) -> nn.Sequential:
    """Return a network that can be cut into stages of a linear layer with its tanh."""
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


def task(seed: int = 0) -> tuple[nn.Module, Any, Any]:
    """Return the model, the loss and an example batch."""
    return network(seed), loss_fn, batch(0)


def capture() -> Captured:
    return shared(*task())


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


SGD = (hp.optim.sgd(lr=0.03, momentum=0.9), Momentum(0.03))
ADAM = (hp.optim.adam(lr=0.01), Adam(0.01))
ADAMW = (hp.optim.adamw(lr=0.01, weight_decay=0.1), Adam(0.01, 0.1))
"""Optimizers of hetpipe, each with the reference's version of it."""


class History(NamedTuple):
    """Weights and optimizer states of each layer after t updates."""

    weights: list[list[Layer]]
    states: list[list[tuple[tuple[torch.Tensor, ...], ...]]]

    @property
    def last(self) -> list[Layer]:
        """The final weights."""
        return [versions[-1] for versions in self.weights]


Choice = Callable[[int, int], tuple[int, float]]
"""Maps (stage, mini-batch) to a t, for W[t], and the number of updates to predict from there."""


def train(
    stages: int,
    optimizer: Momentum | Adam,
    forward: Choice,
    backward: Choice,
    mini_batches: int,
    microbatches: int = 1,
    replicas: Sequence[int] = (),
) -> History:
    """Return the weights after every update; each stage has an equal share of the layers.

    A stage with n replicas updates with the mean gradient of n mini-batches, or of the remaining
    mini-batches at the end.
    """
    layers = [part[0] for part in network()]
    weights = [[Layer(p.weight.detach().clone(), p.bias.detach().clone())] for p in layers]
    states = [[tuple(map(optimizer.start, versions[0]))] for versions in weights]
    cuts = [len(layers) * n // stages for n in range(stages + 1)]
    stage_of = [n for n in range(stages) for _ in range(cuts[n], cuts[n + 1])]
    waiting: list[list[Layer]] = [[] for _ in layers]  # gradients of mini-batches

    def chosen(choice: Choice, b: int) -> list[Layer]:
        found = []
        for index, n in enumerate(stage_of):
            t, ahead = choice(n, b)
            pairs = zip(weights[index][t], states[index][t], strict=True)
            found.append(
                Layer(*(optimizer.predict(w, s, t, ahead) if t and ahead else w for w, s in pairs))
            )
        return found

    for b in range(mini_batches):
        x, y = batch(b)
        ahead, back = chosen(forward, b), chosen(backward, b)
        grads = [Layer(torch.zeros_like(v[0].weight), torch.zeros_like(v[0].bias)) for v in weights]
        for part, wanted in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            _pass(part, wanted, ahead, back, grads)
        for index, grad in enumerate(grads):
            waiting[index].append(grad)
            together = replicas[stage_of[index]] if replicas else 1
            if len(waiting[index]) == together or b == mini_batches - 1:
                mean = [sum(parts) / len(parts) for parts in zip(*waiting[index], strict=True)]
                waiting[index].clear()
                step = len(weights[index])
                values = zip(weights[index][-1], states[index][-1], mean, strict=True)
                moved = [optimizer.update(w, s, g, step) for w, s, g in values]
                weights[index].append(Layer(*(w for w, _ in moved)))
                states[index].append(tuple(s for _, s in moved))
    return History(weights, states)


def _pass(
    x: torch.Tensor,
    wanted: torch.Tensor,
    ahead: Sequence[Layer],
    back: Sequence[Layer],
    grads: Sequence[Layer],
) -> None:
    """Run a forward with the weights `ahead` and a backward with `back`, and add to `grads`."""
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


def train_pipeline(pipe: hp.Pipeline, count: int = MINI_BATCHES) -> dict[str, torch.Tensor]:
    with pipe:
        results = list(pipe.run(batch(b) for b in range(count)))
        assert [result.index for result in results] == list(range(count))
        return pipe.state_dict()


def distance(state: dict[str, torch.Tensor], wanted: list[Layer]) -> float:
    """Return the largest difference of a parameter relative to its largest value."""
    values = [value for layer in wanted for value in layer]
    return max(
        float((found - value).abs().max() / value.abs().max())
        for found, value in zip(state.values(), values, strict=True)
    )
