"""Captured: a model, its loss and an example batch, ready to be cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import nn

from hetpipe.buckets import Buckets, like
from hetpipe.capture import disk_cache
from hetpipe.capture.disk_cache import ModelSummary, summarize
from hetpipe.capture.export.eager import EagerModule
from hetpipe.capture.export.example import Array, Example
from hetpipe.capture.export.flatten import flatten
from hetpipe.capture.export.identity import (
    Identity,
    UnknownCodeError,
    optimizer_identity,
    tables_identity,
)
from hetpipe.capture.export.index_bounds import Indices, mark_checked
from hetpipe.capture.export.layer_labels import check_layers, label, layer_graph
from hetpipe.capture.export.mean_loss import LossCheck
from hetpipe.capture.export.model_changes import Watch
from hetpipe.capture.export.named_tensors import (
    NamedTensors,
    array_of,
    check_capturable,
    copy_loss,
    move_to_cpu,
)
from hetpipe.capture.export.outputs import KnownOutputs, Outputs
from hetpipe.capture.export.padding import IGNORED
from hetpipe.capture.export.torch_export import export
from hetpipe.capture.export.training_modes import Modes
from hetpipe.capture.flat_graph import FlatGraph
from hetpipe.capture.layers import LayerGraph, check_cuts
from hetpipe.capture.passes.partition import check_modes
from hetpipe.capture.passes.split_layers import SplitParameters, split_layers, splittable
from hetpipe.capture.passes.stage_graphs import EXTRAS, Extra, trace_stages
from hetpipe.capture.passes.trace_cache import Traces
from hetpipe.capture.passes.update_programs import check_elementwise
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import Decompositions, StageGraphs
from hetpipe.optim.rule import Optimizer

_T = TypeVar("_T")


class Captured:
    """A model and its loss as graphs. Capture does not change the model.

    Each module trains in the mode, train or eval, that it has at capture; later changes of mode
    have no effect. Warns with `EvalModeWarning` if the whole model is in eval mode.

    `parameters` and `buffers` are copies made at capture, by the model's names; the names of a
    loss's tensors begin with `loss.`. A tied tensor appears once, under its first name; `aliases`
    maps its other names to the first. `has_count` says whether loss_fn returns (sum, count). The
    first export is for `samples` samples, by default the number in the example. `precision` gives
    the dtypes of passes and cuts. With `sync_batch_norm` the batch norms of replicas use the
    statistics of the whole micro-batch. `split` names the linear layers and convolutions to divide
    in two, each with the number of output channels of its first part. `parts` translates names and
    values of split parameters. Every operator named in `starting` begins a new layer. `watch`
    detects later changes of the model. `trains` says whether there are backwards.

    Raises `PlanError` for a layer that cannot be split. Raises `CaptureError` for other faults of
    the model; the error names the line or module, and the cure.
    """

    trains = True
    keeps_output = False  # whether the forwards of training also return the model's output

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: tuple[Any, Any] | Example,
        precision: Precision = Precision(),  # noqa: B008 - frozen
        sync_batch_norm: bool = False,
        samples: int | None = None,
        split: Mapping[str, int] | None = None,
        starting: Collection[str] = (),
    ) -> None:
        check_capturable(model)
        self.name = type(model).__name__
        self._model, self._loss_fn = move_to_cpu(model, loss_fn)
        self._modes = Modes.of(self._model, self._loss_fn, self.trains)
        if self.trains:
            self._modes.warn()
        self.precision = precision
        self.sync_batch_norm = sync_batch_norm
        self.split = dict(split or {})
        self._starting = frozenset(starting)
        self.example = example if isinstance(example, Example) else Example(*example)
        self.padding = self.example.padding  # of the user's batches; None without buckets
        self._flats: dict[tuple[int, bool], FlatGraph] = {}
        self._layers: dict[int, LayerGraph] = {}
        self.traces = Traces()
        self._tensors = NamedTensors(self._model, self._loss_fn)
        self.aliases = self._tensors.aliases
        parameters = self._tensors.parameters
        self.parameters = {name: array_of(name, p) for name, p in parameters.items()}
        self.trainable = frozenset(name for name, p in parameters.items() if p.requires_grad)
        layers = (sorted(self.split.items()), sorted(self._starting), self.trains)
        options = (precision, sync_batch_norm, self.keeps_output, *layers)
        self._outputs = KnownOutputs()
        self._identity = Identity(
            self._model, self._loss_fn, self.example, self._modes, options, self._outputs.note
        )
        first = samples or self.example.samples
        self._summary = self._summarized(first)
        shorter = self.example.sizes([first]) - {first}
        summaries = {size: self._summarized(size) for size in shorter} | {first: self._summary}
        self.indices = Indices({size: each.indices for size, each in summaries.items()})
        self.indices.check_ignored(self.example.assumed_labels, IGNORED)
        self.layer_names, self.samples = self._summary.layer_names, self._summary.samples
        self.parts = SplitParameters(self._summary.rows)
        self.buffers = {
            name: array_of(name, buffer)
            for name, buffer in self._tensors.buffers.items()
            if name in self._summary.buffers and not buffer.is_complex()
        }
        self.watch = Watch(model, loss_fn, self._identity.changed)
        self.updated_buffers = self._summary.updated_buffers
        self.has_count, self.fingerprint = self._summary.has_count, self._summary.fingerprint

    @property
    def exports(self) -> int:
        """Number of exports so far."""
        return len(self._flats)

    def layer_graph(self, samples: int) -> LayerGraph:
        """Return the layers for micro-batches of `samples`; each size is exported only once."""
        if samples not in self._layers:
            key = self._identity.key("layers", [samples], True)
            self._layers[samples] = _load_or_make(key, lambda: layer_graph(self._flat(samples)))
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
        """Return the programs of the stages, which begin at layer 0 and at each of `cuts`.

        `decompositions` has one table per stage, from its backend. `samples` lists the sizes of
        micro-batches; each size gets its own passes. Without an optimizer the stages have no
        update. `recompute` has one mode per stage, see `hetpipe.capture.passes.partition`. With
        `halves` every backward also comes in two halves. `extras` names the programs that only some
        trainings need, see `hetpipe.capture.passes.stage_graphs`.
        """
        check_cuts(cuts, len(decompositions), len(self.layer_names))
        if optimizer is not None:
            check_elementwise(optimizer, self.parts.rows, self.parameters)
        modes = check_modes(recompute, len(decompositions))
        sizes = list(dict.fromkeys(samples))

        def trace() -> list[StageGraphs]:
            rules = None if optimizer is None else self.parts.rules(optimizer)
            return self._trace(sizes, True, cuts, decompositions, rules, modes, halves, extras)

        how = (list(cuts), modes, halves, sorted(extras) if optimizer is not None else [])
        return _load_or_make(self._stage_key(sizes, decompositions, optimizer, True, *how), trace)

    def evaluation_graphs(
        self,
        cuts: Sequence[int],
        decompositions: Sequence[Decompositions],
        samples: Sequence[int],
        has_loss: bool = True,
    ) -> list[StageGraphs]:
        """Return the stages as after `model.eval()`: a forward per size, without SAVED outputs.

        The forwards return the loss and the model's output; without `has_loss` only the output, and
        they do not read `y`. Layers have the same names as in training, but CUT slots have other
        names. Raises `CaptureError` if the model has other layers in eval mode.
        """
        check_cuts(cuts, len(decompositions), len(self.layer_names))
        sizes = list(dict.fromkeys(samples))

        def trace() -> list[StageGraphs]:
            modes = check_modes((), len(decompositions))
            return self._trace(sizes, False, cuts, decompositions, None, modes, has_loss=has_loss)

        how = (list(cuts), has_loss)
        return _load_or_make(self._stage_key(sizes, decompositions, None, False, *how), trace)

    def _trace(
        self, sizes: Sequence[int], training: bool, *how: Any, has_loss: bool = True
    ) -> list[StageGraphs]:
        """Trace the stages, see `trace_stages`, and mark the inputs that the host checks."""
        flats = [self._flat(size, training) for size in sizes]
        flats = flats if has_loss else [flat.without_loss() for flat in flats]
        graphs = trace_stages(self.traces, flats, *how)
        mark_checked(graphs, self.indices)
        return graphs

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

    def leaves(self, x: Any, *y: Any) -> dict[str, Array]:
        """Return the tensors of a batch by name ("x", "x.0", "x.mask", "y"), perhaps without `y`.

        Raises `HetpipeError` if the batch differs in structure from the example batch, or holds an
        index out of range: a class, a token, a row.
        """
        leaves = self.example.leaves(x, *y)
        self.indices.check(leaves, self.example.size_of(leaves))
        return leaves

    def loss_fault(self, samples: int, training: bool = True) -> str:
        """Explain why micro-batches of `samples` would not give the loss of their mini-batch.

        The result is "" if the losses agree. Without `training`, the loss is checked in eval mode.
        See `hetpipe.capture.export.mean_loss`.
        """
        key = self._identity.key(
            "loss", [self._summary.samples], training, samples, self.example.labels_digest,
            self._tensors.loss_digest(),
        )  # fmt: skip

        def compare() -> str:
            output = self.output(self.samples, training)
            with self._modes.apply(evaluation=not training):
                loss, indices = copy_loss(self._loss_fn), self._summary.indices
                check = LossCheck(self._model, loss, self.example, indices, samples)
                return check.fault(output)

        return _load_or_make(key, compare)

    def output(self, size: int, training: bool = False) -> Outputs:
        """Return the structure of the model's output for the length of this size."""
        if not self._outputs.has(size, training):
            self._flat(like(self.samples, size), training)  # it notes the output
        return self._outputs.of(size, training)

    def check_means(self, leaves: Mapping[str, Array], sizes: Sequence[int]) -> None:
        """Check the shares of ignored labels in micro-batches, see `IndexBound.check_means`."""
        if not self.has_count:
            self.indices.check_means(leaves, self.example.size_of(leaves), sizes)

    @property
    def itself(self) -> EagerModule:
        """The model and its loss, for runs in eager torch."""
        names = self.example, self._modes, self.precision, self.trainable
        return EagerModule(self._model, self._loss_fn, *names)

    @cached_property
    def channels(self) -> dict[str, int]:
        """Number of output channels of each layer that can be split; empty after a split."""
        if self.split:
            return {}
        return splittable(self._flat(self._summary.samples), set(self.aliases.values()))

    def _summarized(self, size: int) -> ModelSummary:
        key = self._identity.key("summary", [size], True)
        return _load_or_make(key, lambda: summarize(self._flat(size)))

    def _flat(self, samples: int, training: bool = True) -> FlatGraph:
        if (samples, training) not in self._flats:
            has_output = self.keeps_output or not training
            with self._modes.apply(evaluation=not training):
                program = export(
                    self._model, self._loss_fn, self.example, samples, self.precision,
                    self.sync_batch_norm, partial(self._outputs.note, samples, training),
                    has_output=has_output,
                )  # fmt: skip
            self._identity.check_computing(samples, training)
            trainable = self.trainable if training and self.trains else None
            outputs = self._outputs.of(samples, training).count if has_output else 0
            flat = flatten(program, self.example.names, self.aliases, trainable, samples, outputs)
            flat.precision = self.precision
            summary = getattr(self, "_summary", None)  # None while the first graph is made
            label(
                flat, self._model, self._tensors.parameters, (summary or flat).updated_buffers,
                self._starting,
            )  # fmt: skip
            split_layers(flat, self.split, set(self.aliases.values()))
            if summary is not None:
                check_layers(flat, summary, training)
            self._flats[samples, training] = flat
        return self._flats[samples, training]


class CapturedForwards(Captured):
    """A model for forwards alone, in eval mode: its stages have the forwards without the loss."""

    trains = False

    def stage_graphs(
        self,
        cuts: Sequence[int],
        decompositions: Sequence[Decompositions],
        samples: Sequence[int],
        *_how: Any,
        **_options: Any,
    ) -> list[StageGraphs]:
        """Return the stages, whose passes are forwards that return only the model's output."""
        return self.evaluation_graphs(cuts, decompositions, samples, has_loss=False)

    def _flat(self, samples: int, training: bool = True) -> FlatGraph:
        return super()._flat(samples, training=False)


def _load_or_make(key: str | None, make: Callable[[], _T]) -> _T:
    """Load the entry with this key from the disk; if there is none, make and store it."""
    content: _T | None = None if key is None else disk_cache.load(key)
    if content is None:
        content = make()
        if key is not None:
            disk_cache.store(key, content)
    return content


def capture(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    example: tuple[Any, Any],
    buckets: Buckets | Sequence[int] | None = None,
) -> Captured:
    """Capture `loss_fn(model(x), y)` from an example batch (x, y); see `Captured` and `Buckets`."""
    return Captured(model, loss_fn, Example(*example, buckets))
