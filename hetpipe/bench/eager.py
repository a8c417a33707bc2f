"""Plain torch training, unpartitioned: what pipelines must equal, and are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hetpipe.capture.example import call
from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer

Tree = Any  # a tensor, or tuples, lists and dicts of them


class Eager:
    """A model trained by torch alone, in micro-batches whose gradients are summed.

    The model is trained in place. `sizes` (samples of each micro-batch) must add up to the
    mini-batch; losses weigh as in `hp.Pipeline`.
    """

    def __init__(
        self, model: torch.nn.Module, loss_fn: Callable[[Any, Any], Any], optimizer: Optimizer
    ) -> None:
        self.model = model
        self._loss_fn = loss_fn
        self._optimizer = torch_optimizer(optimizer, list(model.parameters()))

    def step(self, x: Tree, y: Tree, sizes: Sequence[int]) -> float:
        """Train on one mini-batch; its mean loss."""
        self._optimizer.zero_grad()
        rows, lo, total, count = sum(sizes), 0, 0.0, 0.0
        for size in sizes:
            out = call(self.model, rows_of(x, lo, lo + size))
            loss = self._loss_fn(out, rows_of(y, lo, lo + size))
            if isinstance(loss, tuple):
                loss, counted = loss
                count += float(counted)
            else:
                loss = loss * (size / rows)
            loss.backward()
            total += loss.item()
            lo += size
        if count:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad /= count
        self._optimizer.step()
        return total / (count or 1.0)


def torch_optimizer(rule: Optimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer that a rule of `hetpipe.optim` follows. Raises `HetpipeError`."""
    settings = dict(rule.hyperparameters)
    if rule.name == "sgd":
        return torch.optim.SGD(
            parameters,
            lr=rule.lr,
            momentum=settings["momentum"],
            weight_decay=settings["weight_decay"],
            nesterov=bool(settings["nesterov"]),
        )
    if rule.name in ("adam", "adamw"):
        made = torch.optim.Adam if rule.name == "adam" else torch.optim.AdamW
        return made(
            parameters,
            lr=rule.lr,
            betas=(settings["beta1"], settings["beta2"]),
            eps=settings["eps"],
            weight_decay=settings["weight_decay"],
        )
    raise HetpipeError(
        f"torch has no optimizer {rule.name!r} to compare with; use sgd, adam or adamw, "
        "or --no-check"
    )


def micro_sizes(rows: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of min(microbatches, rows) micro-batches; they differ by at most one."""
    count = min(microbatches, rows)
    return tuple(rows // count + (index < rows % count) for index in range(count))


def rows_of(tree: Tree, lo: int, hi: int) -> Tree:
    """Samples lo..hi (hi excluded) of every tensor."""
    if isinstance(tree, Mapping):
        return {key: rows_of(item, lo, hi) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(rows_of(item, lo, hi) for item in tree)
    return tree[lo:hi] if isinstance(tree, torch.Tensor) else tree


def random_layers(model: torch.nn.Module) -> list[str]:
    """Names of active dropout layers: they draw other masks than a pipeline does."""
    return [
        name
        for name, module in model.named_modules()
        if "Dropout" in type(module).__name__ and module.training and getattr(module, "p", 0) > 0
    ]
