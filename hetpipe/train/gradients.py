"""Compares a pipeline's gradients with unpartitioned torch's, and allows for rounding errors."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from hetpipe.check.difference import eps_of, largest_magnitude, tensor_difference, tolerance
from hetpipe.check.reference import with_rounding_errors
from hetpipe.train.eager import Eager, micro_sizes
from hetpipe.zoo.load import optimizer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hetpipe.pipeline.pipeline import Pipeline
    from hetpipe.zoo.workload import Workload

NOISY_RUNS = 3
"""Number of torch's runs with rounding errors in all parameters, which show their effect."""
SPREAD_FACTOR = 2
"""Gradients may differ by this multiple of the effect of rounding, beyond the errors of a sum."""


@dataclass(frozen=True)
class GradientError:
    """The gradient whose error is largest relative to the allowed error; `name` is its parameter.

    `error` and `allowed` are relative to the largest element of torch's gradient.
    """

    name: str
    error: float
    allowed: float

    @property
    def is_right(self) -> bool:
        """Whether rounding explains the error."""
        return self.error <= self.allowed

    def __str__(self) -> str:
        text = f"{self.error:.1g} (gradient of {self.name}, first mini-batch)"
        return text if self.is_right else f"{text}, where rounding makes {self.allowed:.1g} at most"


def compare_gradients(workload: Workload, pipe: Pipeline, seed: int) -> GradientError:
    """Compare the gradients of the first mini-batch with torch's, without changing the weights."""
    batch = next(workload.batches(pipe.plan.mini_batch, seed))
    _, gradients = pipe.gradients(*batch)
    model = copy.deepcopy(workload.model)
    model.load_state_dict(pipe.state_dict(), strict=False)
    sizes = micro_sizes(pipe.plan.mini_batch, pipe.plan.microbatches)

    def of_torch(noise: int | None = None) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(model)
        if noise is not None:
            disturb_parameters(own, noise)
        Eager(own, workload.loss_fn, optimizer_of(workload)).backward(*batch, sizes)
        named = own.named_parameters()
        return {name: each.grad for name, each in named if each.grad is not None}

    right = of_torch()
    spreads = dict.fromkeys(right, 0.0)
    for noise in range(NOISY_RUNS):
        for name, gradient in of_torch(noise).items():
            spreads[name] = max(spreads[name], tensor_difference(gradient, right[name], 1).error)
    return furthest(gradients, right, spreads, terms_in(batch))


def furthest(
    gradients: Mapping[str, torch.Tensor],
    right: Mapping[str, torch.Tensor],
    spreads: Mapping[str, float],
    terms: int,
) -> GradientError:
    """Return the gradient with the largest error, in units of the error that rounding explains.

    `spreads` has the effect of rounding by parameter, and `terms` is the number of terms in the
    longest sum. The allowed error includes the rounding error of the largest gradient, because some
    gradients are exactly zero in theory.
    """
    largest = max((largest_magnitude(gradient) for gradient in right.values()), default=0.0)
    found: list[GradientError] = []
    for name, expected in right.items():
        actual = gradients.get(name)
        if actual is None:
            actual = torch.zeros_like(expected)
        compared = tensor_difference(actual, expected, terms)
        allowed = compared.allowed + SPREAD_FACTOR * spreads[name]
        allowed += tolerance(largest, eps_of(expected.dtype))
        unit = largest_magnitude(expected) or largest or 1.0
        found.append(GradientError(name, compared.error / unit, allowed / unit))
    return max(found, key=lambda each: each.error / each.allowed if each.allowed else math.inf)


def terms_in(batch: Any) -> int:
    """Return the number of elements of a mini-batch's largest tensor, a bound for terms of sums."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return max((tensor.numel() for tensor in tensors), default=1)


def disturb_parameters(model: torch.nn.Module, seed: int) -> None:
    """Add a random rounding error to every element of every parameter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(with_rounding_errors(parameter, generator))
