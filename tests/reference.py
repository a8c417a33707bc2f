"""Unpartitioned training in plain torch on the same micro-batches, which pipelines must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

Parameters = list[nn.Parameter]


class Trained(NamedTuple):
    """The result of a training; a tied parameter appears once, under its first name."""

    losses: list[float]
    """One loss per mini-batch, the mean over its samples."""
    gradients: dict[str, torch.Tensor]
    """Gradients of the first update, by parameter name, before `before_step`."""
    state: dict[str, torch.Tensor]
    """The model's state dict after the last update."""
    loss_state: dict[str, torch.Tensor]
    """The state dict of a loss that is a module; empty for a function."""


def train(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Iterable[tuple[Any, Any]],
    microbatches: int,
    optimizer: Callable[[Parameters], torch.optim.Optimizer],
    *,
    accumulate: int = 1,
    before_step: Callable[[Parameters], object] | None = None,
) -> Trained:
    """Train copies of the model and of the loss.

    `loss_fn` returns a mean over samples, or a sum and a count. `optimizer` receives the model's
    parameters, then the loss's. An update follows every `accumulate` mini-batches and the
    last one. `before_step` receives the parameters with their gradients, for example to clip them.
    """
    model, loss_fn = copy.deepcopy((model, loss_fn))
    loss_module = loss_fn if isinstance(loss_fn, nn.Module) else nn.Module()
    parameters = list(nn.ModuleList([model, loss_module]).parameters())
    steps = optimizer(parameters)
    data, losses = list(batches), []
    gradients: dict[str, torch.Tensor] = {}
    for start in range(0, len(data), accumulate):
        steps.zero_grad()
        update_count = 0.0
        for x, y in data[start : start + accumulate]:
            total, count = backward(model, loss_fn, x, y, microbatches)
            losses.append(total / count)
            update_count += count
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= update_count
        if not gradients:
            gradients = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        if before_step is not None:
            before_step(parameters)
        steps.step()
    return Trained(losses, gradients, model.state_dict(), loss_module.state_dict())


def gradients_of(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], x: Any, y: Any, microbatches: int = 1
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one mini-batch."""
    batches = [(x, y)]
    trained = train(model, loss_fn, batches, microbatches, lambda p: torch.optim.SGD(p, lr=0.0))
    return trained.losses[0], trained.gradients


def backward(
    model: nn.Module, loss_fn: Callable[[Any, Any], Any], x: Any, y: Any, microbatches: int
) -> tuple[float, float]:
    """Add a mini-batch's gradients; return the loss's sum and count (1 if the loss is a mean)."""
    rows = leaf(x).shape[0]
    total = total_count = 0.0
    lo = 0
    for size in sizes(rows, microbatches):
        result = loss_fn(call(model, cut(x, lo, lo + size)), cut(y, lo, lo + size))
        share = size / rows
        loss, count = result if isinstance(result, tuple) else (result * share, share)
        loss.backward()
        total += float(loss.detach())
        total_count += float(count)
        lo += size
    return total, total_count


def check_close(
    found: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    rtol: float = 1e-4,
    atol: float = 1e-6,
) -> None:
    """Compare every expected tensor with the one of the same name."""
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol)


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all tensors, relative to the expected norm."""
    a, b = (torch.cat([x[name].flatten() for name in expected]) for x in (found, expected))
    return float((a - b).norm() / b.norm())


def sizes(rows: int, microbatches: int) -> list[int]:
    """Return min(microbatches, rows) sizes that differ by at most one, the larger first."""
    count = min(microbatches, rows)
    return [rows // count + (index < rows % count) for index in range(count)]


def leaf(value: Any) -> torch.Tensor:
    """Return the first tensor in a batch."""
    if isinstance(value, torch.Tensor):
        return value
    return leaf(next(iter(value.values())) if isinstance(value, dict) else value[0])


def cut(value: Any, lo: int, hi: int) -> Any:
    """Return samples lo to hi of a batch."""
    if isinstance(value, torch.Tensor):
        return value[lo:hi]
    if isinstance(value, dict):
        return {key: cut(item, lo, hi) for key, item in value.items()}
    return tuple(cut(item, lo, hi) for item in value)


def call(model: nn.Module, x: Any) -> Any:
    """Call the model; a tuple gives its arguments, a dict its keyword arguments."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)
