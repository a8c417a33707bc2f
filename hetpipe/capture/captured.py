"""Captured: a model, its loss and an example batch, ready to be cut into stages."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hetpipe.capture.example import Array, Example
from hetpipe.capture.export import export
from hetpipe.capture.flat import Flat, flatten
from hetpipe.capture.indices import check_indices, index_bounds, mark_checked
from hetpipe.capture.joint import Decompositions
from hetpipe.capture.labels import label, layer_graph
from hetpipe.capture.layers import LayerGraph
from hetpipe.capture.modes import Modes
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import BUFFER, COUNT, StageGraphs
from hetpipe.capture.recompute import check_modes
from hetpipe.capture.stages import trace_stages
from hetpipe.errors import CaptureError
from hetpipe.optim.rule import Optimizer


class Captured:
    """A model as graphs. The model itself is neither changed nor run.

    Each module trains in the mode, train or eval, that it is in now; a later change of mode does
    not count. Warns with `EvalModeWarning` if the whole model is in eval mode.

    `parameters` and `buffers` are copies made at capture, by the model's names. A tied tensor is
    there once; `aliases` maps its other names to that name. `name` is the name of the model's
    class. `has_count` says that loss_fn returns (sum, count).
    The model is exported for `samples` samples first, by default those of the example, and for
    other numbers when they are asked for.
    `precision` gives the dtypes of the passes and of the cuts. With `sync_batch_norm` the batch
    norms of replicas use the statistics of the whole micro-batch, not of their own rows.
    Raises `CaptureError`, which names the line or module, and the cure.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: tuple[Any, Any],
        precision: Precision = Precision(),  # noqa: B008 - frozen
        sync_batch_norm: bool = False,
        samples: int | None = None,
    ) -> None:
        self.name = type(model).__name__
        self._model = _on_cpu(model)
        self._loss_fn = loss_fn
        self._modes = Modes.of(self._model, loss_fn)
        self._modes.warn()
        self.precision = precision
        self.sync_batch_norm = sync_batch_norm
        self._example = Example(*example)
        self._flats: dict[tuple[int, bool], Flat] = {}
        self._layers: dict[int, LayerGraph] = {}
        self.aliases = _aliases(self._model)
        parameters = dict(self._model.named_parameters())
        self.parameters = {name: _array(name, p) for name, p in parameters.items()}
        self.trainable = frozenset(name for name, p in parameters.items() if p.requires_grad)
        flat = self._flat(samples or self._example.samples)
        self.layer_names = flat.layer_names
        read = {name for role, name in flat.inputs.values() if role == BUFFER}
        self.buffers = {
            name: _array(name, buffer)
            for name, buffer in self._model.named_buffers()
            if name in read | flat.updated_buffers
        }
        self.updated_buffers = flat.updated_buffers
        self.has_count = any(key[0] == COUNT for key, _ in flat.outputs)
        self.fingerprint = _fingerprint(flat)
        self._indices = index_bounds(flat)

    def layer_graph(self, samples: int) -> LayerGraph:
        """The layers for micro-batches of `samples`; each size is exported once, then cached."""
        if samples not in self._layers:
            self._layers[samples] = layer_graph(self._flat(samples))
        return self._layers[samples]

    def stage_graphs(
        self,
        cuts: Sequence[int],
        decompositions: Sequence[Decompositions],
        samples: Sequence[int],
        optimizer: Optimizer | None,
        recompute: Sequence[str] = (),
        halves: bool = False,
    ) -> list[StageGraphs]:
        """The programs of the stages, which begin at layer 0 and at each of `cuts`.

        `decompositions` has one table per stage, from its backend. `samples` lists the sizes of
        micro-batches; each gets its own passes. Without an optimizer the stages have no update.
        `recompute` has one mode per stage, see `hetpipe.capture.recompute`. With `halves` every
        backward also comes in two halves.
        """
        self._check(cuts, decompositions)
        modes = check_modes(recompute, len(decompositions))
        flats = [self._flat(size) for size in dict.fromkeys(samples)]
        graphs = trace_stages(flats, cuts, decompositions, optimizer, modes, halves)
        mark_checked(graphs, self._indices)
        return graphs

    def evaluation_graphs(
        self,
        cuts: Sequence[int],
        decompositions: Sequence[Decompositions],
        samples: Sequence[int],
    ) -> list[StageGraphs]:
        """The same stages after `model.eval()`: a forward per micro-batch size that saves nothing.

        Each size is exported once, then cached. Layers have their names of training; CUT slots have
        other names. Raises `CaptureError` if the model has other layers in eval mode.
        """
        self._check(cuts, decompositions)
        flats = [self._flat(size, training=False) for size in dict.fromkeys(samples)]
        modes = check_modes((), len(decompositions))
        graphs = trace_stages(flats, cuts, decompositions, None, modes)
        mark_checked(graphs, self._indices)
        return graphs

    def _check(self, cuts: Sequence[int], decompositions: Sequence[Decompositions]) -> None:
        count = len(self.layer_names)
        bounds = [0, *cuts, count]
        if any(a >= b for a, b in itertools.pairwise(bounds)):
            raise CaptureError(
                f"cuts {list(cuts)} must increase strictly between 0 and the {count} layers"
            )
        if len(decompositions) != len(cuts) + 1:
            raise CaptureError(
                f"{len(decompositions)} decomposition tables for {len(cuts) + 1} stages; give one "
                "per stage"
            )

    def leaves(self, x: Any, y: Any) -> dict[str, Array]:
        """The tensors of a batch by name ("x", "x.0", "x.mask", "y").

        Raises `HetpipeError` if the batch is not built like the example batch, or holds an index
        out of range: a class, a token, a row.
        """
        leaves = self._example.leaves(x, y)
        check_indices(self._indices, leaves)
        return leaves

    def _flat(self, samples: int, training: bool = True) -> Flat:
        if (samples, training) not in self._flats:
            with self._modes.restored(evaluation=not training):
                program = export(
                    self._model, self._loss_fn, self._example, samples, self.precision,
                    self.sync_batch_norm,
                )  # fmt: skip
            trainable = self.trainable if training else None
            flat = flatten(program, self._example.names, self.aliases, trainable, samples)
            first = next(iter(self._flats.values()), flat)
            flat.precision = self.precision
            label(flat, self._model, first.updated_buffers)
            _check_layers(flat, first, "training" if training else "eval mode")
            self._flats[samples, training] = flat
        return self._flats[samples, training]


def _check_layers(flat: Flat, first: Flat, mode: str) -> None:
    """Raise `CaptureError` unless `flat` has the layers of `first`, the graph in training."""
    if flat.layer_names == first.layer_names:
        return
    pairs = itertools.zip_longest(flat.layer_names, first.layer_names, fillvalue="none")
    number, (name, expected) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
    raise CaptureError(
        f"the model has {len(flat.layer_names)} layers for {flat.samples} samples in {mode} but "
        f"{len(first.layer_names)} for {first.samples} in training: layer {number} is {name}, not "
        f"{expected}; its structure may depend on neither the batch size nor the mode"
    )


def capture(model: nn.Module, loss_fn: Callable[..., Any], example: tuple[Any, Any]) -> Captured:
    """Capture `loss_fn(model(x), y)` from an example batch (x, y); see `Captured`."""
    return Captured(model, loss_fn, example)


def _on_cpu(model: nn.Module) -> nn.Module:
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return model
    if any(tensor.device.type == "meta" for tensor in tensors):
        raise CaptureError("the model is on the meta device; give its parameters values first")
    return copy.deepcopy(model).cpu()


def _aliases(model: nn.Module) -> dict[str, str]:
    canonical = {id(p): name for name, p in [*model.named_parameters(), *model.named_buffers()]}
    every = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {name: canonical[id(p)] for name, p in every if canonical[id(p)] != name}


def _array(name: str, tensor: torch.Tensor) -> Array:
    if tensor.dtype in (torch.bfloat16,) or tensor.is_complex() or tensor.layout != torch.strided:
        raise CaptureError(
            f"{name} is a {tensor.layout} tensor of {tensor.dtype}; convert it, for instance with "
            "model.float()"
        )
    return np.array(tensor.detach().numpy(), order="C", copy=True)


def _fingerprint(flat: Flat) -> str:
    """A hash of operators, arguments, shapes and layers; values of parameters do not enter."""
    index = {node: str(i) for i, node in enumerate(flat.graph.nodes)}
    digest = hashlib.sha256(repr(flat.precision).encode())
    for node in flat.graph.nodes:
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), index.__getitem__)
        value = node.meta.get("val")
        shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ""
        role = flat.inputs.get(node, "")
        row = (node.op, str(node.target) if node.op == "call_function" else "", role)
        digest.update(repr((row, args, kwargs, shape, flat.layer.get(node))).encode())
    for name, value in sorted(flat.constants.items()):
        digest.update(name.encode() + value.numpy().tobytes())
    return digest.hexdigest()
