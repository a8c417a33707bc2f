"""Runs the user's module and a loss over the whole mini-batch in eager torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from hetpipe.capture.export.eager import EagerModule, EagerRun, own_name, record_outputs
from hetpipe.capture.export.example import Array
from hetpipe.capture.export.torch_export import run_loss, run_model, scalars_of
from hetpipe.capture.export.training_modes import Modes
from hetpipe.capture.export.whole_padding import LABELS
from hetpipe.check.reference import default_dtype, to_float64
from hetpipe.errors import HetpipeError


class _Both(nn.Module):
    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, x: Any, *labels: Any) -> Any:
        """Return the model's output for x or, with labels, the scalars of the loss of output x."""
        if not labels:
            return run_model(self.model, x)
        return scalars_of(run_loss(self.loss_fn, x, *labels))


@dataclass(frozen=True)
class EagerWholeLoss(EagerModule):
    """As `EagerModule`; the outputs of all micro-batches have one loss.

    The y of `example` has the user's y as `LABELS`. `loss_modes` are the modes of the loss.
    """

    loss_modes: Modes = field(kw_only=True)
    aliases: Mapping[str, str] = field(kw_only=True)
    """Names of layers that model and loss share."""

    def run(
        self,
        values: Mapping[str, Array],
        feeds: Sequence[Mapping[str, Array]],
        tangents: Sequence[float],
        wide: bool,
    ) -> EagerRun:
        """As `EagerModule.run`, with the mean loss of all micro-batches.

        The gradients belong to the mean or, if the loss has a count, to the sum. Raises
        `HetpipeError` if the loss draws random numbers.
        """
        both, outputs = _Both(self.model, self.loss_fn), list[tuple[str, Tensor]]()
        tensors, parameters = dict[str, Tensor](), dict[str, Tensor]()
        by_name: dict[str, Tensor] = {}
        for full, tensor in [*both.named_parameters(), *both.named_buffers()]:
            name = self.aliases.get(own_name(full), own_name(full))
            if name not in by_name:
                value = torch.tensor(values[name]) if name in values else tensor.detach().clone()
                by_name[name] = to_float64(value) if wide else value
                if name in self.trainable:
                    parameters[name] = by_name[name].requires_grad_()
            tensors[full] = by_name[name]
        batches = [self._batch(feed, wide) for feed in feeds]
        dtypes = default_dtype(torch.float64) if wide else self.precision.autocast()
        parts = []
        with self.modes.apply(), self.loss_modes.apply(), dtypes, torch.enable_grad():
            for number, (x, _) in enumerate(batches):
                with record_outputs(both, outputs, number == 0):
                    parts.append(functional_call(both, tensors, (x,)))
            out = tree_map(_joined, *parts)
            labels = tree_map(_joined, *(y for _, y in batches))
            before = torch.get_rng_state()
            total, *count = functional_call(both, tensors, (out, labels))
            if not torch.equal(before, torch.get_rng_state()):
                raise HetpipeError("loss_fn draws random numbers")
            (total * tangents[0]).backward()
        gradients = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
        mean = float(total.detach()) / float(count[0] if count else 1)
        return EagerRun([mean], gradients, outputs)

    def _batch(self, feed: Mapping[str, Array], wide: bool) -> tuple[Any, Any]:
        leaves = [torch.tensor(feed[name]) for name in self.example.names]
        x, y = self.example.rebuild(to_float64(leaves) if wide else leaves)
        return x, y[LABELS]


def _joined(*parts: Any) -> Any:
    """Join the parts of a tensor; return any other value unchanged."""
    return torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
