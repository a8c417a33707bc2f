"""Captured: a model, its loss and an example batch, ready to be cut into stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import nn

from hetpipe.capture import disk_cache
from hetpipe.capture.export.eager import EagerModule
from hetpipe.capture.export.example import Array, Example
from hetpipe.capture.export.flatten import flatten
from hetpipe.capture.export.identity import Identity, optimizer_identity, tables_identity
from hetpipe.capture.export.index_bounds import check_indices, check_means, mark_checked
from hetpipe.capture.export.layer_labels import label, layer_graph
from hetpipe.capture.export.mean_loss import LossCheck
from hetpipe.capture.export.model_changes import Watch
from hetpipe.capture.export.named_tensors import (
    NamedTensors,
    array_of,
    check_capturable,
    copied_loss,
    on_cpu,
)
from hetpipe.capture.export.outputs import Outputs
from hetpipe.capture.export.source_files import UnknownCodeError
from hetpipe.capture.export.summary import Facts, facts_of
from hetpipe.capture.export.torch_export import export
from hetpipe.capture.export.training_modes import Modes
from hetpipe.capture.flat_graph import Flat
from hetpipe.capture.layers import LayerGraph
from hetpipe.capture.passes.elementwise import check_elementwise
from hetpipe.capture.passes.recompute import check_modes
from hetpipe.capture.passes.split_layers import split_layers, splittable
from hetpipe.capture.passes.split_parameters import Parts
from hetpipe.capture.passes.stage_graphs import EXTRAS, Extra, trace_stages
from hetpipe.capture.passes.trace_cache import Traces
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import Decompositions, StageGraphs
from hetpipe.errors import CaptureError
from hetpipe.optim.rule import Optimizer

_T = TypeVar("_T")


class Captured:
    """A model and its loss as graphs. The model itself is neither changed nor run.

    Each module trains in the mode, train or eval, that it is in now; a later change of mode does
    not count. Warns with `EvalModeWarning` if the whole model is in eval mode.

    `parameters` and `buffers` are copies made at capture, by the model's names; the names of a
    loss's tensors begin with `loss.`. A tied tensor is there once; `aliases` maps its other names
    to that name. `name` is the name of the model's
    class. `has_count` says that loss_fn returns (sum, count).
    The model is exported for `samples` samples first, by default those of the example, and for
    other numbers when they are asked for.
    `precision` gives the dtypes of the passes and of the cuts. With `sync_batch_norm` the batch
    norms of replicas use the statistics of the whole micro-batch, not of their own rows.
    `split` makes two layers of a linear layer or convolution, by its name: the first has so many
    of its output channels. `parts` translates names and values of the parameters that it splits.
    Operators `starting`, by name, begin a layer of their own.
    Raises `PlanError` for a layer that cannot be split so, and otherwise `CaptureError`, which
    names the line or module, and the cure. `watch` tells later changes of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: tuple[Any, Any],
        precision: Precision = Precision(),  # noqa: B008 - frozen
        sync_batch_norm: bool = False,
        samples: int | None = None,
        split: Mapping[str, int] | None = None,
        starting: Collection[str] = (),
    ) -> None:
        check_capturable(model)
        self.name = type(model).__name__
        self._model, self._loss_fn = on_cpu(model, loss_fn)
        self._modes = Modes.of(self._model, self._loss_fn)
        self._modes.warn()
        self.precision = precision
        self.sync_batch_norm = sync_batch_norm
        self.split = dict(split or {})
        self._starting = frozenset(starting)
        self._example = Example(*example)
        self._flats: dict[tuple[int, bool], Flat] = {}
        self._layers: dict[int, LayerGraph] = {}
        self.traces = Traces()
        self._tensors = NamedTensors(self._model, self._loss_fn)
        self.aliases = self._tensors.aliases
        parameters = self._tensors.parameters
        self.parameters = {name: array_of(name, p) for name, p in parameters.items()}
        self.trainable = frozenset(name for name, p in parameters.items() if p.requires_grad)
        layers = (sorted(self.split.items()), sorted(self._starting))
        options = (precision, sync_batch_norm, *layers)
        self._outputs: dict[bool, Outputs] = {}  # of the model, in training and in eval mode
        self._identity = Identity(
            self._model, self._loss_fn, self._example, self._modes, options, self._saw
        )
        first = samples or self._example.samples
        key = self._identity.key("facts", [first], True)
        self._facts: Facts = _kept(key, lambda: facts_of(self._flat(first)))
        self.layer_names, self.samples = self._facts.layer_names, self._facts.samples
        self.parts = Parts(self._facts.rows)
        self.buffers = {
            name: array_of(name, buffer)
            for name, buffer in self._tensors.buffers.items()
            if name in self._facts.buffers and not buffer.is_complex()
        }
        self.watch = Watch(model, loss_fn, self._identity.changed)
        self.updated_buffers = self._facts.updated_buffers
        self.has_count = self._facts.has_count
        self.fingerprint = self._facts.fingerprint

    @property
    def exports(self) -> int:
        """The number of exports so far."""
        return len(self._flats)

    def layer_graph(self, samples: int) -> LayerGraph:
        """The layers for micro-batches of `samples`; each size is exported once, then cached."""
        if samples not in self._layers:
            key = self._identity.key("layers", [samples], True)
            self._layers[samples] = _kept(key, lambda: layer_graph(self._flat(samples)))
        return self._layers[samples]

    def stage_graphs(
        self,
        cuts: Sequence[int],
        decompositions: Sequence[Decompositions],
        samples: Sequence[int],
        optimizer: Optimizer | None,
        recompute: Sequence[str] = (),
        halves: bool = False,
        extras: Collection[Extra] = EXTRAS,
    ) -> list[StageGraphs]:
        """The programs of the stages, which begin at layer 0 and at each of `cuts`.

        `decompositions` has one table per stage, from its backend. `samples` lists the sizes of
        micro-batches; each gets its own passes. Without an optimizer the stages have no update.
        `recompute` has one mode per stage, see `hetpipe.capture.passes.recompute`. With `halves`
        every backward also comes in two halves. The stages have the programs `predict` and `norm`
        only if these are among `extras`.
        """
        self._check(cuts, decompositions)
        if optimizer is not None:
            check_elementwise(optimizer, self.parts.rows, self.parameters)
        modes = check_modes(recompute, len(decompositions))
        sizes = list(dict.fromkeys(samples))

        def trace() -> list[StageGraphs]:
            flats = [self._flat(size) for size in sizes]
            rules = None if optimizer is None else self.parts.rules(optimizer)
            graphs = trace_stages(
                self.traces, flats, cuts, decompositions, rules, modes, halves, extras
            )
            mark_checked(graphs, self._facts.indices)
            return graphs

        how = (list(cuts), modes, halves, sorted(extras) if optimizer is not None else [])
        return _kept(self._stage_key(sizes, decompositions, optimizer, True, *how), trace)

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
        sizes = list(dict.fromkeys(samples))

        def trace() -> list[StageGraphs]:
            flats = [self._flat(size, training=False) for size in sizes]
            modes = check_modes((), len(decompositions))
            graphs = trace_stages(self.traces, flats, cuts, decompositions, None, modes)
            mark_checked(graphs, self._facts.indices)
            return graphs

        return _kept(self._stage_key(sizes, decompositions, None, False, list(cuts)), trace)

    def _stage_key(
        self,
        samples: Sequence[int],
        decompositions: Sequence[Decompositions],
        optimizer: Optimizer | None,
        training: bool,
        *more: object,
    ) -> str | None:
        try:
            rules = optimizer_identity(optimizer, list(self.parameters))
            tables = tables_identity(decompositions)
        except UnknownCodeError:
            return None
        return self._identity.key("stages", samples, training, tables, rules, *more)

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
        check_indices(self._facts.indices, leaves)
        return leaves

    def loss_fault(self, samples: int, training: bool = True) -> str:
        """Why micro-batches of `samples` would not give the loss of their mini-batch, with both
        numbers and the cure; "" if they do.

        Without `training` it is the loss in eval mode. See `hetpipe.capture.export.mean_loss`.
        """
        key = self._identity.key(
            "loss", [self._facts.samples], training, samples, self._example.labels_digest,
            self._tensors.loss_digest(),
        )  # fmt: skip

        def compare() -> str:
            if training not in self._outputs:  # the code has no signature, and was not exported
                self._flat(self._facts.samples, training)
            with self._modes.restored(evaluation=not training):
                check = LossCheck(
                    self._model,
                    copied_loss(self._loss_fn),
                    self._example,
                    self._facts.indices,
                    samples,
                )
                return check.fault(self._outputs.get(training))

        return _kept(key, compare)

    def _saw(self, samples: int, training: bool, output: Any) -> None:
        self._outputs[training] = Outputs.of(output, samples)

    def check_means(self, leaves: Mapping[str, Array], sizes: Sequence[int]) -> None:
        """Raise `HetpipeError` where parts of a batch, of these sizes, leave out unequal shares of
        the labels over which the loss is a mean."""
        if not self.has_count:
            check_means(self._facts.indices, leaves, sizes)

    @property
    def itself(self) -> EagerModule:
        """The module and its loss, to be run by eager torch."""
        names = self._example, self._modes, self.precision, self.trainable
        return EagerModule(self._model, self._loss_fn, *names)

    @cached_property
    def channels(self) -> dict[str, int]:
        """Output channels of the layers that can be split; none if some are."""
        if self.split:
            return {}
        return splittable(self._flat(self._facts.samples), set(self.aliases.values()))

    def _flat(self, samples: int, training: bool = True) -> Flat:
        if (samples, training) not in self._flats:
            with self._modes.restored(evaluation=not training):
                program = export(
                    self._model, self._loss_fn, self._example, samples, self.precision,
                    self.sync_batch_norm, partial(self._saw, samples, training),
                )  # fmt: skip
            self._identity.check_computing(samples, training)
            trainable = self.trainable if training else None
            flat = flatten(program, self._example.names, self.aliases, trainable, samples)
            flat.precision = self.precision
            facts = getattr(self, "_facts", None)  # None while they are made, from the first flat
            label(
                flat, self._model, self._tensors.parameters, (facts or flat).updated_buffers,
                self._starting,
            )  # fmt: skip
            split_layers(flat, self.split, set(self.aliases.values()))
            if facts is not None:
                _check_layers(flat, facts, "training" if training else "eval mode")
            self._flats[samples, training] = flat
        return self._flats[samples, training]


def _check_layers(flat: Flat, facts: Facts, mode: str) -> None:
    """Raise `CaptureError` unless `flat` has the layers of the first graph, in training."""
    if flat.layer_names == facts.layer_names:
        return
    pairs = itertools.zip_longest(flat.layer_names, facts.layer_names, fillvalue="none")
    number, (name, expected) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
    raise CaptureError(
        f"the model has {len(flat.layer_names)} layers for {flat.samples} samples in {mode} but "
        f"{len(facts.layer_names)} for {facts.samples} in training: layer {number} is {name}, not "
        f"{expected}; its structure may depend on neither the batch size nor the mode"
    )


def _kept(key: str | None, make: Callable[[], _T]) -> _T:
    """The content that is kept on disk under a key, or else is made, and kept."""
    content: _T | None = None if key is None else disk_cache.load(key)
    if content is None:
        content = make()
        if key is not None:
            disk_cache.store(key, content)
    return content


def capture(model: nn.Module, loss_fn: Callable[..., Any], example: tuple[Any, Any]) -> Captured:
    """Capture `loss_fn(model(x), y)` from an example batch (x, y); see `Captured`."""
    return Captured(model, loss_fn, example)
