"""Trains a workload on a pipeline; compares losses and gradients with unpartitioned torch's."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from hetpipe.check.difference import eps_of, largest_magnitude, tensor_difference, tolerance
from hetpipe.check.reference import with_rounding_errors
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.pipeline.options import UpdateOptions
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.train.eager import PLAIN, Eager, compared_sizes
from hetpipe.zoo.load import optimizer_of

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.plan.plan import Plan
    from hetpipe.zoo.workload import Workload

NOISY_RUNS = 3
"""Number of torch's runs with rounding errors in all parameters; they show rounding's effect."""
SPREAD_FACTOR = 2
"""Gradients may differ by this multiple of rounding's effect, plus the rounding errors of a sum."""


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


ROUNDING_FACTOR = 2
"""Losses may differ by this multiple of the effect that rounding has on the training."""


@dataclass(frozen=True)
class Step:
    """One step; `expected` is unpartitioned torch's loss, or None if torch did not run."""

    index: int
    loss: float
    time_s: float
    expected: float | None = None

    @property
    def difference(self) -> float:
        """The relative difference from torch's loss; 0 without `expected`."""
        if self.expected is None:
            return 0.0
        return relative(self.loss, self.expected)


def relative(loss: float, expected: float) -> float:
    """Return the difference of two losses, relative to the expected loss."""
    return abs(loss - expected) / max(abs(expected), 1e-12)


def torch_losses(
    workload: Workload,
    sizes: Sequence[int],
    steps: int,
    seed: int,
    updates: UpdateOptions = PLAIN,
    rounding: bool = False,
) -> tuple[float, ...]:
    """Return the losses of unpartitioned torch on a copy of the model, in micro-batches of `sizes`.

    With `rounding`, rounding errors are added to the initial weights, so the losses change by the
    effect of rounding on this training.
    """
    if not steps:  # torch may lack the optimizer
        return ()
    model = copy.deepcopy(workload.model)
    if rounding:
        disturb_parameters(model, seed=0)
    eager = Eager(model, workload.loss_fn, optimizer_of(workload), updates)
    batches = workload.batches(sum(sizes), seed)
    return tuple(eager.step(x, y, sizes) for x, y in islice(batches, steps))


def train(
    workload: Workload, pipe: Pipeline, steps: int, *, seed: int, expected: Sequence[float] = ()
) -> Iterator[Step]:
    """Train `steps` more mini-batches of the plan's size, and yield a `Step` for each.

    `expected` has the losses of `torch_losses` for the first steps. A step's time is the wait for
    its result, without the caller's work between results.
    """
    batches = workload.batches(pipe.plan.mini_batch, seed)
    with one_thread():
        results = pipe.run(islice(batches, pipe.steps, pipe.steps + steps))
        for index in range(steps):
            begin_s = time.perf_counter()
            result = next(results)
            time_s = time.perf_counter() - begin_s
            expected_loss = expected[index] if index < len(expected) else None
            yield Step(result.index, result.loss, time_s, expected_loss)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch in this process to one thread: idle threads would spin on the workers' cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Comparison:
    """Comparison of the losses of `steps` steps, and of a mini-batch's gradients, with torch's.

    `difference` is the largest relative difference of a loss, and `rounding` the difference that
    rounding explains. `gradient` is the gradient with the largest error; None if gradients were not
    compared.
    """

    steps: int
    difference: float = 0.0
    rounding: float = 0.0
    gradient: GradientError | None = None

    @property
    def losses_are_equal(self) -> bool:
        """Whether rounding explains the difference of the losses."""
        return self.difference <= self.rounding

    @property
    def equal(self) -> bool:
        """Whether rounding explains the differences of losses and gradients."""
        return self.losses_are_equal and (self.gradient is None or self.gradient.is_right)

    def __str__(self) -> str:
        parts = []
        if self.steps:
            loss = f"{self.difference:.0e} (loss, {self.steps} steps)"
            if not self.losses_are_equal:
                loss += f", where rounding makes {self.rounding:.0e} at most"
            parts.append(loss)
        if self.gradient is not None:
            parts.append(str(self.gradient))
        start = "equal to" if self.equal else "differs from"
        return f"{start} unpartitioned torch: {'; '.join(parts)}"


def compare(
    workload: Workload,
    plan: Plan,
    taken: Sequence[Step],
    seed: int,
    gradient: GradientError | None = None,
    updates: UpdateOptions = PLAIN,
) -> Comparison | None:
    """Compare the steps that have an expected loss; return None if nothing was compared.

    The model must still have its initial weights. If losses differ by more than the rounding of one
    number, torch trains again from these weights, with rounding errors added.
    """
    expected = [step.expected for step in taken if step.expected is not None]
    if not expected:
        return None if gradient is None else Comparison(0, gradient=gradient)
    worst = max(step.difference for step in taken)
    eps = eps_of(*(parameter.dtype for parameter in workload.model.parameters()))
    rounding = tolerance(1.0, eps)
    if not worst <= rounding:
        sizes = compared_sizes(workload.model, plan.mini_batch, plan.microbatches)
        rounded = torch_losses(workload, sizes, len(expected), seed, updates, rounding=True)
        drift = max(relative(loss, true) for loss, true in zip(rounded, expected, strict=True))
        rounding += ROUNDING_FACTOR * drift
    return Comparison(len(expected), worst, rounding, gradient)


@contextmanager
def open_pipeline(
    workload: Workload,
    cluster: Cluster,
    *,
    mini_batch: int | None = None,
    seed: int = 0,
    resume: Path | None = None,
    **options: Any,
) -> Iterator[Pipeline]:
    """Open a pipeline that trains the workload, and close it at the end.

    `mini_batch` is by default the plan's, or else the workload's. `resume` is the folder of a
    checkpoint to continue from; `options` are more keywords of `Pipeline`. Raises `HetpipeError` if
    the pipeline cannot be opened.
    """
    plan: Plan | None = options.get("plan")
    samples = mini_batch or (plan.mini_batch if plan is not None else workload.mini_batch)
    example = next(workload.batches(samples, seed))
    options |= {"cluster": cluster, "optimizer": optimizer_of(workload), "seed": seed}
    if resume is None:
        pipe = Pipeline(workload.model, workload.loss_fn, example, **options)
    else:
        pipe = Pipeline.load(resume, workload.model, workload.loss_fn, example, **options)
    with pipe:
        yield pipe
