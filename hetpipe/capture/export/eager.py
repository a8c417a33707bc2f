"""Runs the user's module and loss in eager torch, to compare captured programs with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from hetpipe.capture.export.example import Array, Example
from hetpipe.capture.export.named_tensors import LOSS_PREFIX
from hetpipe.capture.export.torch_export import WithLoss
from hetpipe.capture.export.training_modes import Modes
from hetpipe.capture.precision import Precision
from hetpipe.check.reference import default_dtype, to_float64

PREFIX = "model."
"""Prefix of the model's names in the module that joins model and loss."""
OF_LOSS = "loss_fn."
"""Prefix of the loss's names in that module."""


@dataclass(frozen=True)
class EagerRun:
    """Losses by micro-batch, summed gradients by parameter, and outputs of modules.

    `outputs` lists (name of the module, output) in the order of the calls, for the first
    micro-batch.
    """

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    outputs: list[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class EagerModule:
    """A model with its loss, as the user wrote them, in the modes of the capture."""

    model: nn.Module
    loss_fn: Callable[..., Any]
    example: Example
    modes: Modes
    precision: Precision
    trainable: Collection[str]

    def run(
        self,
        values: Mapping[str, Array],
        feeds: Sequence[Mapping[str, Array]],
        tangents: Sequence[float],
        wide: bool,
    ) -> EagerRun:
        """Run the micro-batches `feeds` with autograd; `tangents` multiply the losses' gradients.

        `values` replace parameters and buffers of the same name; the model's own tensors do not
        change. With `wide` torch computes in float64, otherwise in the precision of the passes.
        Raises the model's own errors.
        """
        module = WithLoss(self.model, self.loss_fn, self.example)
        tensors, parameters = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for full, tensor in [*module.named_parameters(), *module.named_buffers()]:
            name = own_name(full)
            value = torch.tensor(values[name]) if name in values else tensor.detach().clone()
            tensors[full] = to_float64(value) if wide else value
            if name in self.trainable:
                parameters[name] = tensors[full].requires_grad_()
        losses, outputs = [], list[tuple[str, torch.Tensor]]()
        dtypes = default_dtype(torch.float64) if wide else self.precision.autocast()
        with self.modes.apply(), dtypes, torch.enable_grad():
            for number, (feed, tangent) in enumerate(zip(feeds, tangents, strict=True)):
                leaves = [torch.tensor(feed[name]) for name in self.example.names]
                arguments = tuple(to_float64(leaves)) if wide else tuple(leaves)
                with record_outputs(module, outputs, number == 0):
                    loss = functional_call(module, tensors, arguments)[0]
                if loss.requires_grad:
                    (loss * tangent).backward()
                losses.append(float(loss.detach()))
        gradients = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
        return EagerRun(losses, gradients, outputs)


def own_name(full: str) -> str:
    """Return the name in checkpoints of a tensor of the module that joins model and loss."""
    if full.startswith(OF_LOSS):
        return LOSS_PREFIX + full.removeprefix(OF_LOSS)
    return full.removeprefix(PREFIX)


@contextmanager
def record_outputs(
    with_loss: nn.Module, outputs: list[tuple[str, torch.Tensor]], watches: bool
) -> Iterator[None]:
    """With `watches`, append to `outputs` the first tensor that each module returns."""

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
