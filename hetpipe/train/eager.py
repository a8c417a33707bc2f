"""Plain torch training without partitions: the reference for results and rates of pipelines."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hetpipe.capture.export.example import call
from hetpipe.errors import HetpipeError
from hetpipe.optim.rule import Optimizer
from hetpipe.optim.torch_optimizer import CLASSES
from hetpipe.pipeline.batches import micro_sizes
from hetpipe.pipeline.options import UpdateOptions

Tree = Any  # a tensor, or tuples, lists and dicts of tensors
PLAIN = UpdateOptions()


class Eager:
    """Training of a model by torch alone, in micro-batches with summed gradients.

    Training changes the model in place. `sizes` has the samples of each micro-batch; they sum to
    the samples of the mini-batch. A micro-batch's loss has the same weight as in `hp.Pipeline`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: Callable[[Any, Any], Any],
        optimizer: Optimizer,
        updates: UpdateOptions = PLAIN,
    ) -> None:
        self.model = model
        self._loss_fn = loss_fn
        parameters = dict(model.named_parameters())
        self._rules = optimizer.rules
        self._optimizer = torch_optimizer(optimizer, parameters)
        self._updates = updates
        self._steps = 0  # mini-batches

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that persist between steps: parameters, buffers, optimizer state."""
        state = [value for each in self._optimizer.state.values() for value in each.values()]
        tensors = [each for each in state if isinstance(each, torch.Tensor)]
        return [*self.model.parameters(), *self.model.buffers(), *tensors]

    def step(self, x: Tree, y: Tree, sizes: Sequence[int]) -> float:
        """Train on one mini-batch and return its mean loss. Update after `accumulate` of them."""
        parameters, count = list(self.model.parameters()), self._updates.accumulate
        earlier = [p.grad if self._steps % count else None for p in parameters]
        loss = self.backward(x, y, sizes)
        self._steps += 1
        for parameter, gradient in zip(parameters, earlier, strict=True):
            if gradient is not None and parameter.grad is not None:
                parameter.grad += gradient
        if self._steps % count == 0:
            self._update([p for p in parameters if p.grad is not None])
        return loss

    def _update(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Update with the mean of the gradients that the parameters have summed."""
        count, clip = self._updates.accumulate, self._updates.clip_norm
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= count
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        for group, rule in zip(self._optimizer.param_groups, self._rules, strict=True):
            group["lr"] = rule.lr_at(self._steps // count)
        self._optimizer.step()

    def backward(self, x: Tree, y: Tree, sizes: Sequence[int]) -> float:
        """Compute a mini-batch's gradients into the parameters, and return its mean loss."""
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
        return total / (count or 1.0)


def torch_optimizer(
    rule: Optimizer, parameters: Mapping[str, torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return torch's optimizer for a rule of `hetpipe.optim`, with a group for each group of the
    rule. Raises `HetpipeError` if torch has no such optimizer."""
    if rule.name not in CLASSES:
        raise HetpipeError(
            f"torch has no optimizer {rule.name!r} to compare with; use {', '.join(CLASSES)}, "
            "or --no-check"
        )
    make: Callable[..., torch.optim.Optimizer] = CLASSES[rule.name]
    groups: list[dict[str, Any]] = [
        {"params": [], "lr": each.lr_at(1), **_settings(each, make)} for each in rule.rules
    ]
    for name, parameter in parameters.items():
        groups[rule.group_of(name)]["params"].append(parameter)
    return make(groups)


def _settings(rule: Optimizer, make: Callable[..., torch.optim.Optimizer]) -> dict[str, Any]:
    """Return a rule's settings as torch's optimizer takes them."""
    given = dict(rule.hyperparameters)
    settings: dict[str, Any] = {}
    for name, parameter in inspect.signature(make).parameters.items():
        if name == "betas":
            settings[name] = given["beta1"], given["beta2"]
        elif name in given:
            is_flag = isinstance(parameter.default, bool)
            settings[name] = bool(given[name]) if is_flag else given[name]
    return settings


def compared_sizes(model: torch.nn.Module, rows: int, microbatches: int) -> tuple[int, ...]:
    """Return the sizes of micro-batches in which plain torch trains for a comparison: one size, the
    mini-batch, or the pipeline's sizes if a batch norm takes its statistics from the batch."""
    norms = (module for module in model.modules() if isinstance(module, _BatchNorm))
    mixes = any(module.training or not module.track_running_stats for module in norms)
    return micro_sizes(rows, microbatches) if mixes else (rows,)


def rows_of(tree: Tree, lo: int, hi: int) -> Tree:
    """Return the samples lo..hi (hi excluded) of every tensor."""
    if isinstance(tree, Mapping):
        return {key: rows_of(item, lo, hi) for key, item in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple(rows_of(item, lo, hi) for item in tree)
    return tree[lo:hi] if isinstance(tree, torch.Tensor) else tree


def random_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of active dropout layers, whose masks differ from a pipeline's."""
    return [
        name
        for name, module in model.named_modules()
        if "Dropout" in type(module).__name__ and module.training and getattr(module, "p", 0) > 0
    ]
