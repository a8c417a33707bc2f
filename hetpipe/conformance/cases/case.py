"""Operator cases: functions of torch tensors, their inputs, and the length of their sums.

A check traces the function into a canonical graph, runs the graph on the device, and compares the
results with the function's results in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

aten = torch.ops.aten


@dataclass(frozen=True)
class Feed:
    """An input. `kind`: float, positive, int (0 to below `high`), bool, or rng (dropout's state).

    Values are random, except for rng.
    """

    shape: tuple[int, ...]
    kind: str = "float"
    high: int = 0

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Return a new tensor; a floating tensor is float32."""
        if self.kind == "rng":
            return torch.tensor([-0x123456789ABCDEF, 3, 5])
        if self.kind == "int":
            return torch.randint(0, self.high, self.shape, generator=generator)
        value = torch.randn(self.shape, generator=generator)
        if self.kind == "bool":
            return value > 0
        return value.abs() + 0.1 if self.kind == "positive" else value


@dataclass(frozen=True)
class Case:
    """A function of tensors, with its inputs.

    `terms` is the number of terms in the longest sum; the tolerance depends on it. Reference
    devices skip `large` cases, because they are slow.
    """

    family: str
    name: str
    fn: Callable[..., Any]
    feeds: tuple[Feed, ...]
    terms: int = 1
    large: bool = False
    tolerance: float = field(default=16.0)  # in units of sqrt(terms) * eps * largest magnitude

    @property
    def has_gradients(self) -> bool:
        """Whether the function's results include gradients."""
        return self.fn.__name__ == "gradients_too"


def r(*shape: int) -> Feed:
    return Feed(shape)


def feeds(shapes: str) -> Iterator[Feed]:
    """Yield the inputs that a row of a table names.

    `2x3` is a tensor of floats, `()` a scalar, `+2x3` has positive floats, `?2x3` bools, `9:2x3`
    integers below 9, and `rng` is a state of dropout.
    """
    for word in shapes.split():
        if word == "rng":
            yield Feed((3,), "rng")
            continue
        high, _, shape = word.rpartition(":")
        kind = "int" if high else {"+": "positive", "?": "bool"}.get(word[0], "float")
        numbers = shape.strip("+?()")
        yield Feed(tuple(map(int, numbers.split("x"))) if numbers else (), kind, int(high or 0))


def grads(fn: Callable[..., torch.Tensor], count: int) -> Callable[..., Any]:
    """Return a function of `fn`'s arguments and a tangent.

    It returns `fn`'s value and its gradients with respect to the first `count` arguments.
    """

    def gradients_too(*args: torch.Tensor) -> Any:
        *inputs, tangent = args
        inputs = [t.detach().requires_grad_(i < count) for i, t in enumerate(inputs)]
        with torch.enable_grad():
            value = fn(*inputs)
            gradients = torch.autograd.grad(value, inputs[:count], tangent)
        return (value.detach(), *gradients)

    return gradients_too


CASES: list[Case] = []


def table(family: str) -> Callable[..., None]:
    """Return a function that adds a case to `family`; `settings` are further fields of `Case`."""

    def case(name: str, fn: Callable[..., Any], *inputs: Feed | str, **settings: Any) -> None:
        each = [feeds(row) if isinstance(row, str) else (row,) for row in inputs]
        CASES.append(Case(family, name, fn, tuple(chain(*each)), **settings))

    return case
