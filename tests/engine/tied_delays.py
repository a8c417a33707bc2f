"""Asynchronous training of a model with tied weights, as one float64 loop in plain torch.

The loop keeps every version of every parameter. A pass of a stage reads the versions that the
policy's formula says. In the passes of a mini-batch, a tied parameter has the same version on all
stages after its owner: the one that the owner's forward of the first micro-batch has read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from delayed import Adam, Momentum
from torch import nn

from hetpipe.zoo.gpt import GPT
from hetpipe.zoo.text import token_loss

SAMPLES = 4
LENGTH, VOCABULARY = 5, 11

Batch = tuple[torch.Tensor, torch.Tensor]


class Chain(nn.Module):
    """Four linear layers. Layers 0, 2 and 3 share a weight, layers 1 and 3 a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.parts[2].weight = self.parts[3].weight = self.parts[0].weight
        self.parts[3].bias = self.parts[1].bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


def squares(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return (found - wanted).square().sum(1).mean()


def _vectors(generator: torch.Generator) -> Batch:
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return x, torch.tanh(x * 2)


def _tokens(generator: torch.Generator) -> Batch:
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class Subject:
    """A model with tied weights; by number of stages, its cuts and the stages of its parameters.

    A parameter is on the stage of the first prefix of its name.
    """

    model: Callable[[], nn.Module]
    loss_fn: Callable[..., torch.Tensor]
    make: Callable[[torch.Generator], Batch]
    cuts: Mapping[int, Sequence[int]]
    stages: Mapping[int, Mapping[str, int]]

    def start(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().double()

    def batch(self, index: int) -> Batch:
        return self.make(torch.Generator().manual_seed(100 + index))

    def stage_of(self, name: str, stages: int) -> int:
        """Return the stage that reads a parameter under one of its names."""
        return next(n for part, n in self.stages[stages].items() if name.startswith(part))


SUBJECTS = {
    "chain": Subject(
        Chain, squares, _vectors,
        {2: [2], 3: [1, 3], 4: [1, 2, 3]},
        {
            2: {"parts.0": 0, "parts.1": 0, "parts.2": 1, "parts.3": 1},
            3: {"parts.0": 0, "parts.1": 1, "parts.2": 1, "parts.3": 2},
            4: {"parts.0": 0, "parts.1": 1, "parts.2": 2, "parts.3": 3},
        },
    ),
    "gpt": Subject(
        partial(GPT, VOCABULARY, LENGTH, 8, 2, 2), token_loss, _tokens,
        {2: [6], 3: [2, 10], 4: [2, 6, 10]},
        {
            2: {"embedding": 0, "blocks.0": 0, "blocks.1.norm1": 0, "": 1},
            3: {"embedding": 0, "blocks.0.norm1": 0, "head": 2, "": 1},
            4: {"embedding": 0, "blocks.0.norm1": 0, "blocks.0": 1, "blocks.1.norm1": 1,
                "head": 3, "": 2},
        },
    ),
}  # fmt: skip


Choice = Callable[[int, int], tuple[int, float]]
"""Maps (stage, micro-batch) to a number of updates, and the number of updates to predict."""


def delays(policy: str, depths: Sequence[int], microbatches: int) -> tuple[Choice, Choice]:
    """Return the papers' formulas for straight pipelines: forward and backward."""
    stages = len(depths)

    def seen(n: int, m: int) -> int:
        return max(0, (m - depths[n] + 1) // microbatches)

    def passed(n: int, m: int) -> int:
        return m // microbatches

    def entered(n: int, m: int) -> int:
        return seen(0, m - m % microbatches)

    rules: dict[str, tuple[Choice, Choice]] = {
        "stash": (lambda n, m: (seen(n, m), 0),) * 2,
        "vertical-sync": (lambda n, m: (entered(n, m), 0),) * 2,
        "2bw": (lambda n, m: (max(0, passed(n, m) - 1), 0),) * 2,
        "pipeoptim": (
            lambda n, m: (seen(n, m), passed(n, m) - seen(n, m)),
            lambda n, m: (passed(n, m), 0),
        ),
        "spectrain": (
            lambda n, m: (seen(n, m), n // 2 + stages - n - 1),
            lambda n, m: (passed(n, m), n // 2),
        ),
    }
    return rules[policy]


class Training:
    """The loop, which can go on after a flush."""

    def __init__(
        self,
        subject: Subject,
        stages: int,
        optimizer: Momentum | Adam,
        choices: tuple[Choice, Choice],
        microbatches: int = 1,
        clip_norm: float = float("inf"),
        replicas: Sequence[int] = (),
    ) -> None:
        self.subject, self.optimizer, self.microbatches = subject, optimizer, microbatches
        self.clip_norm, self.replicas = clip_norm, replicas or (1,) * stages
        self.forward, self.backward = choices
        tied = subject.start()
        first = {id(p): name for name, p in tied.named_parameters()}
        every = dict(tied.named_parameters(remove_duplicate=False))
        self.owners = {name: first[id(p)] for name, p in every.items()}
        self.model = _untied(tied)
        self.parameters = dict(self.model.named_parameters())
        self.stage_of = {name: subject.stage_of(name, stages) for name in every}
        owned = [name for name, owner in self.owners.items() if name == owner]
        self.weights = {name: [every[name].detach().clone()] for name in owned}
        self.states = {name: [optimizer.start(every[name].detach())] for name in owned}
        self.flushed = dict.fromkeys(owned, 0)  # updates before the last flush
        self.waiting: dict[str, list[torch.Tensor]] = {name: [] for name in owned}  # gradients

    def run(self, batches: Sequence[Batch]) -> None:
        """Train on these mini-batches, from an empty pipeline, and flush."""
        for b, (x, y) in enumerate(batches):
            grads = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
            parts = zip(x.chunk(self.microbatches), y.chunk(self.microbatches), strict=True)
            for place, (part, wanted) in enumerate(parts):
                self._pass(b * self.microbatches + place, part, wanted, grads)
            self._update(grads, b == len(batches) - 1)
        self.flushed = {name: len(versions) - 1 for name, versions in self.weights.items()}

    @property
    def last(self) -> dict[str, torch.Tensor]:
        return {name: versions[-1] for name, versions in self.weights.items()}

    def _read(self, choice: Choice, name: str, m: int) -> torch.Tensor:
        owner = self.owners[name]
        stage = self.stage_of[owner]
        if self.stage_of[name] != stage:
            choice, m = self.forward, m - m % self.microbatches
        t, ahead = choice(stage, m)
        t += self.flushed[owner]
        weights, state = self.weights[owner][t], self.states[owner][t]
        return self.optimizer.predict(weights, state, t, ahead) if t and ahead else weights

    def _load(self, choice: Choice, m: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self._read(choice, name, m))

    def _pass(self, m: int, x: torch.Tensor, y: torch.Tensor, grads: Any) -> None:
        self._load(self.forward, m)
        loss = self.subject.loss_fn(self.model(x), y) / self.microbatches
        self._load(self.backward, m)  # the backward reads the saved parameters
        found = torch.autograd.grad(loss, list(self.parameters.values()))
        for name, grad in zip(self.parameters, found, strict=True):
            grads[name] += grad

    def _update(self, grads: Mapping[str, torch.Tensor], flushes: bool) -> None:
        """Apply the gradients of a mini-batch, or of a round on stages with replicas."""
        sums = {name: torch.zeros_like(versions[0]) for name, versions in self.weights.items()}
        for name, grad in grads.items():
            sums[self.owners[name]] += grad
        for n in set(self.stage_of.values()):
            own = [name for name in sums if self.stage_of[name] == n]
            for name in own:
                self.waiting[name].append(sums[name])
            if own and (flushes or len(self.waiting[own[0]]) == self.replicas[n]):
                self._apply(own)

    def _apply(self, names: Sequence[str]) -> None:
        """Apply the mean of the waiting gradients of one stage."""
        means = {name: sum(self.waiting[name]) / len(self.waiting[name]) for name in names}
        norm = sum(float(mean.square().sum()) for mean in means.values()) ** 0.5
        factor = min(1.0, self.clip_norm / (norm + 1e-6))
        for name, mean in means.items():
            self.waiting[name].clear()
            weights, states = self.weights[name], self.states[name]
            step = len(weights)
            new = self.optimizer.update(weights[-1], states[-1], mean * factor, step)
            weights.append(new[0])
            states.append(new[1])


def _untied(model: nn.Module) -> nn.Module:
    """Return a copy in which every name of a parameter has a separate tensor."""
    model = copy.deepcopy(model)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        module, _, short = name.rpartition(".")
        setattr(model.get_submodule(module), short, nn.Parameter(parameter.detach().clone()))
    return model


def distance(state: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of all parameters, relative to their largest value."""
    most = max(float(value.abs().max()) for value in wanted.values())
    return max(float((state[name] - value).abs().max()) for name, value in wanted.items()) / most
