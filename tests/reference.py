"""Unpartitioned training in plain torch over the same micro-batches: what pipelines must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn


def train(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Any],
    batches: Iterable[tuple[Any, Any]],
    microbatches: int,
    optimizer: torch.optim.Optimizer,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of every mini-batch, and the gradients of the first by parameter name.

    A tied parameter is listed once, under the first of its names. Losses are weighted by samples.
    """
    losses: list[float] = []
    first: dict[str, torch.Tensor] = {}
    for x, y in batches:
        optimizer.zero_grad()
        rows = leaf(x).shape[0]
        total = 0.0
        lo = 0
        for size in sizes(rows, microbatches):
            out = call(model, cut(x, lo, lo + size))
            loss = loss_fn(out, cut(y, lo, lo + size)) * (size / rows)
            loss.backward()
            total += float(loss.detach())
            lo += size
        if not first:
            first = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        losses.append(total)
    return losses, first


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Of all tensors as one vector, relative to the second."""
    a, b = (torch.cat([x[name].flatten() for name in wanted]) for x in (found, wanted))
    return float((a - b).norm() / b.norm())


def sizes(rows: int, microbatches: int) -> list[int]:
    """min(microbatches, rows) sizes that differ by at most one, the larger first."""
    count = min(microbatches, rows)
    return [rows // count + (index < rows % count) for index in range(count)]


def leaf(value: Any) -> torch.Tensor:
    """The first tensor in a batch."""
    if isinstance(value, torch.Tensor):
        return value
    return leaf(next(iter(value.values())) if isinstance(value, dict) else value[0])


def cut(value: Any, lo: int, hi: int) -> Any:
    """Samples lo..hi of a batch."""
    if isinstance(value, torch.Tensor):
        return value[lo:hi]
    if isinstance(value, dict):
        return {key: cut(item, lo, hi) for key, item in value.items()}
    return tuple(cut(item, lo, hi) for item in value)


def call(model: nn.Module, x: Any) -> Any:
    """`model(x)`, a tuple as arguments, a dict as keyword arguments."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)
