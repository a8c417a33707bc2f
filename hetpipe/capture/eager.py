"""Eager runs of the user's module and loss, with which captured programs are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hetpipe.capture.example import Array

PREFIX = "model."
"""Stands before the model's names in the module that has its loss, too."""


@dataclass(frozen=True)
class EagerRun:
    """Losses by micro-batch, summed gradients by parameter, and outputs of modules.

    `outputs` has the modules of the first micro-batch in the order of their calls.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    outputs: list[tuple[str, torch.Tensor]]


def run_eagerly(
    with_loss: nn.Module,
    values: Mapping[str, Array],
    trainable: Collection[str],
    batches: Sequence[Sequence[torch.Tensor]],
    tangents: Sequence[float],
    wide: bool,
) -> EagerRun:
    """Run micro-batches of leaves by autograd, each loss times its tangent; `wide` in float64.

    `values` replace parameters and buffers of the same name. The module's own tensors stay as
    they are. Raises what the module raises.
    """
    tensors, parameters = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for full, own in [*with_loss.named_parameters(), *with_loss.named_buffers()]:
        name = full.removeprefix(PREFIX)
        given = torch.tensor(values[name]) if name in values else own.detach().clone()
        tensors[full] = _widened(given) if wide else given
        if name in trainable:
            parameters[name] = tensors[full].requires_grad_()
    losses, outputs = [], list[tuple[str, torch.Tensor]]()
    for number, (leaves, tangent) in enumerate(zip(batches, tangents, strict=True)):
        given_leaves = tuple(map(_widened, leaves)) if wide else tuple(leaves)
        with torch.enable_grad(), _default_dtype(wide), _watched(with_loss, outputs, number == 0):
            loss = functional_call(with_loss, tensors, given_leaves)[0]
            if loss.requires_grad:
                (loss * tangent).backward()
        losses.append(float(loss.detach()))
    gradients = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
    return EagerRun(losses, gradients, outputs)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _default_dtype(wide: bool) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if wide else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _watched(
    with_loss: nn.Module, outputs: list[tuple[str, torch.Tensor]], watches: bool
) -> Iterator[None]:
    """Append the first tensor that each module of the model returns, if it `watches`."""

    def hook(name: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, result: Any) -> None:
            first = result[0] if isinstance(result, (tuple, list)) and result else result
            if isinstance(first, torch.Tensor):
                outputs.append((name, first.detach().clone()))

        return note

    modules = with_loss.named_modules() if watches else ()
    handles = [
        module.register_forward_hook(hook(name.removeprefix(PREFIX)))
        for name, module in modules
        if name.startswith(PREFIX)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
