"""A loss over whole mini-batches: stages are captured with a substitute for the user's loss, which
runs in eager torch, in the pipeline's process, on the joined outputs of all micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hetpipe.capture.captured import Captured, CapturedForwards
from hetpipe.capture.eager_whole_loss import EagerWholeLoss
from hetpipe.capture.export.attributes import names_module
from hetpipe.capture.export.example import Array, Example
from hetpipe.capture.export.model_changes import Watch
from hetpipe.capture.export.named_tensors import LOSS_PREFIX, check_capturable, deep_copy
from hetpipe.capture.export.outputs import Outputs, tensors_of
from hetpipe.capture.export.torch_export import run_loss, run_model, scalars_of
from hetpipe.capture.export.training_modes import Modes
from hetpipe.capture.export.unsupported import explain
from hetpipe.capture.export.whole_padding import LABELS, OUTPUTS, buckets_of, lengths_of
from hetpipe.errors import CaptureError, HetpipeError

PARAMETERS = "parameters"
"""The part of the substitute's y with the gradients by parameters."""


class Substitute(nn.Module):
    """Returns the sum of the products of outputs and parameters with given gradients.

    So the given gradients are the gradients of its result. It has the parameters of the user's
    loss, by the same names. A parameter's gradient has a row per sample, and the rows are summed.
    """

    def __init__(self, loss_fn: Callable[..., Any]) -> None:
        super().__init__()
        if isinstance(loss_fn, nn.Module):
            self._modules, self._parameters = loss_fn._modules, loss_fn._parameters
            self.training = loss_fn.training

    def forward(self, out: Any, y: Mapping[str, Any]) -> Tensor:
        gradients = y[OUTPUTS]
        pairs = list(zip(_floats(out, len(gradients[0])), gradients, strict=True))
        named = y[PARAMETERS]
        pairs += [(value, named[n]) for n, value in self.named_parameters() if n in named]
        return torch.stack([(value * gradient).sum() for value, gradient in pairs]).sum()


def _floats(out: Any, samples: int) -> list[Tensor]:
    return [tensor for tensor in tensors_of(out, samples) if tensor.is_floating_point()]


@dataclass(frozen=True)
class LossValue:
    """A loss: its sum and count, or its mean and None. `gradients` of the sum, or of the mean, have
    a row per sample; their names are leaves of the captured batch."""

    total: float
    count: float | None
    gradients: dict[str, Array]


class WholeLossCaptured(Captured):
    """A model captured for a loss over whole mini-batches; the arguments are as for `Captured`.

    Runs model and loss once, with the example. Raises `CaptureError` if the loss needs more than
    the model's output, `y`, and its parameters.
    """

    keeps_output = True

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: tuple[Any, Any] | Example,
        **how: Any,
    ) -> None:
        check_capturable(model)
        own = loss_fn.modules() if isinstance(loss_fn, nn.Module) else ()
        holder = getattr(loss_fn, "__self__", None)  # of a method
        if names_module(loss_fn, model) or isinstance(holder, nn.Module) or model in set(own):
            raise CaptureError(
                "loss_over='mini-batch': loss_fn refers to a module of the model, but the loss "
                "runs apart from the model: let the model return all that the loss needs"
            )
        self._user = example if isinstance(example, Example) else Example(*example)
        self._loss = deep_copy(loss_fn).cpu() if isinstance(loss_fn, nn.Module) else loss_fn
        self._loss_modes = Modes.of(nn.Module(), self._loss)
        samples = self._user.samples
        out = _run(model, self._user, samples)
        floats = _floats(out, samples)
        if not floats:
            raise CaptureError(
                "loss_over='mini-batch': the model's output has no tensor of real numbers whose "
                "first dimension is the samples: return such a tensor"
            )
        self._outputs_like = [np.empty((0, *t.shape[1:]), _dtype(t)) for t in floats]
        self._parameters_like = {
            name: np.empty((0, *p.shape), _dtype(p)) for name, p in self._trained()
        }
        x, y = self._user.rebuild(self._user.tensors(samples))
        self._lengths: dict[int, int] = {}
        buckets = None
        if self._user.padding is not None:
            shorter = self._user.padding.another(samples)
            other = _floats(_run(model, self._user, shorter), samples)
            self._lengths = lengths_of(floats, other, self._user.padding, shorter)
            buckets = buckets_of(self._user.padding, self._lengths)
        super().__init__(
            model, Substitute(loss_fn), Example(x, self._with_zeros(y, samples), buckets), **how
        )
        self.padding = self._user.padding  # by the user's names
        self.watch = Watch(model, loss_fn, self._identity.changed)
        tensors = {str(n): tensor.numpy() for n, tensor in enumerate(tensors_of(out, samples))}
        values = {name: self.parameters[name] for name in self.loss_parameters}
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        structure, leaves = Outputs.of(out, samples), self.leaves(x, y)
        self.try_loss = partial(
            self._value, structure, tensors, leaves, values, training=self.trains, seed=0
        )
        self.try_loss()

    @property
    def loss_parameters(self) -> list[str]:
        """The captured names of the loss's trained parameters."""
        names = [LOSS_PREFIX + name for name, _ in self._trained()]
        return [self.aliases.get(name, name) for name in names]

    @property
    def itself(self) -> EagerWholeLoss:
        """The model and the user's loss, for runs in eager torch."""
        names = self.example, self._modes, self.precision, self.trainable
        return EagerWholeLoss(
            self._model, self._loss, *names, loss_modes=self._loss_modes, aliases=self.aliases
        )

    def leaves(self, x: Any, *y: Any) -> dict[str, Array]:
        """Return the tensors of a batch by name, and zeros for the gradients of the loss."""
        rows = len(next(iter(self._user.leaves(x, *y).values())))
        length = self._user.length_of(x)
        return super().leaves(x, *(self._with_zeros(labels, rows, length) for labels in y))

    def loss_fault(self, samples: int, training: bool = True) -> str:
        """Return "": no loss of a micro-batch is used."""
        return ""

    def value(
        self,
        outputs: Mapping[str, Array],
        leaves: Mapping[str, Array],
        values: Mapping[str, Array],
        training: bool,
        seed: int,
    ) -> LossValue:
        """Return the loss of a mini-batch, in training with its gradients.

        `outputs` are the model's, by number, `leaves` the batch's, and `values` has the present
        `loss_parameters`. Numbers that the loss draws depend only on `seed`. Raises `HetpipeError`.
        """
        structure = self.output(self.samples, training)
        return self._value(structure, outputs, leaves, values, training=training, seed=seed)

    def _value(
        self,
        structure: Outputs,
        outputs: Mapping[str, Array],
        leaves: Mapping[str, Array],
        values: Mapping[str, Array],
        *,
        training: bool,
        seed: int,
    ) -> LossValue:
        out = structure.rebuild(outputs)
        _, y = self.example.rebuild([torch.from_numpy(leaves[n]) for n in self.example.names])
        parameters = [parameter for _, parameter in self._trained()]
        for parameter, name in zip(parameters, self.loss_parameters, strict=True):
            parameter.data = torch.tensor(values[name])
        sources = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.is_floating_point()]
        for source in sources:
            source.requires_grad_(training)
        with (
            self._loss_modes.apply(evaluation=not training), torch.set_grad_enabled(training),
            torch.random.fork_rng(devices=()), self.precision.autocast(),
        ):  # fmt: skip
            torch.manual_seed(seed)
            scalars = self._scalars(tree_map(_copy, out), y[LABELS])
        total, count = scalars[0], float(scalars[1]) if len(scalars) == 2 else None
        gradients = self._gradients(total, sources, parameters) if training else {}
        return LossValue(float(total.detach()), count, gradients)

    def _scalars(self, out: Any, labels: Any) -> tuple[Tensor, ...]:
        """Run the loss. Raises `HetpipeError` for its errors, and if it changes a buffer."""
        module = self._loss if isinstance(self._loss, nn.Module) else nn.Module()
        before = {name: buffer._version for name, buffer in module.named_buffers()}
        try:
            loss = run_loss(self._loss, out, labels)
        except HetpipeError:
            raise
        except Exception as error:
            raise _failed(error, "fails") from error
        for name, buffer in module.named_buffers():
            if buffer._version != before.get(name):
                raise HetpipeError(
                    f"loss_fn changes its buffer {name}, which loss_over='mini-batch' would not "
                    "save: keep the buffer in the model, or leave loss_over out"
                )
        return scalars_of(loss)

    def _gradients(
        self, total: Tensor, sources: list[Tensor], parameters: list[nn.Parameter]
    ) -> dict[str, Array]:
        """Return the gradients of the loss, by the captured names of their leaves."""
        wanted = [*sources, *parameters]
        _check_sources(total, wanted)
        try:
            found = torch.autograd.grad(total, wanted, allow_unused=True)
        except Exception as error:
            raise _failed(error, "has no gradient") from error
        pairs = zip(found, wanted, strict=True)
        arrays = [torch.zeros_like(v) if g is None else g for g, v in pairs]
        rows, count = len(sources[0]), len(sources)
        gradients = {}
        for number, (like, array) in enumerate(zip(self._outputs_like, arrays, strict=False)):
            gradients[f"y.{OUTPUTS}.{number}"] = array.to(torch.from_numpy(like).dtype).numpy()
        for (name, like), array in zip(self._parameters_like.items(), arrays[count:], strict=True):
            gradients[f"y.{PARAMETERS}.{name}"] = every = _zeros(like, rows)
            every[0] = array.numpy()
        return gradients

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the trained parameters of the loss, by their own names."""
        module = self._loss if isinstance(self._loss, nn.Module) else nn.Module()
        return [(name, p) for name, p in module.named_parameters() if p.requires_grad]

    def _with_zeros(self, labels: Any, rows: int, length: int = 0) -> dict[str, Any]:
        """Return the substitute's y; without `length`, for batches as long as the example."""
        likes = [*self._outputs_like]
        for number, dim in self._lengths.items() if length else ():
            shape = [*likes[number].shape]
            shape[dim] = length
            likes[number] = np.empty(shape, likes[number].dtype)
        return {
            LABELS: labels,
            OUTPUTS: [_zeros(like, rows) for like in likes],
            PARAMETERS: {name: _zeros(like, rows) for name, like in self._parameters_like.items()},
        }


def _failed(error: Exception, what: str) -> HetpipeError:
    line = (str(error).splitlines() or [""])[0]
    return HetpipeError(
        f"loss_fn {what} for the outputs of a mini-batch ({type(error).__name__}: {line}): "
        "it gets the model's output and y, of all samples, on the CPU"
    )


def _zeros(like: Array, rows: int) -> Array:
    return np.zeros((rows, *like.shape[1:]), like.dtype)


class WholeLossForwards(CapturedForwards, WholeLossCaptured):
    """The same for forwards alone."""


def capture_of(trains: bool, whole_loss: bool) -> type[Captured]:
    """Return the class of captures for a training or for forwards alone."""
    if whole_loss:
        return WholeLossCaptured if trains else WholeLossForwards
    return Captured if trains else CapturedForwards


def _dtype(tensor: Tensor) -> Any:
    return np.dtype(str(tensor.dtype).removeprefix("torch."))


def _copy(value: Any) -> Any:
    """Copy a tensor, since a loss may change its output in place."""
    return value.clone() if isinstance(value, Tensor) else value


def _run(model: nn.Module, example: Example, size: int) -> Any:
    """Return the output of a copy of the model, for the example. Raises `CaptureError`."""
    x, _ = example.rebuild(example.tensors(size))
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        try:
            return run_model(deep_copy(model).cpu(), x)
        except Exception as error:
            raise explain(error) from error


def _check_sources(total: Tensor, wanted: list[Tensor]) -> None:
    """Raise `HetpipeError` if a loss has a gradient for no wanted tensor, or for another tensor."""
    known, found = {id(tensor) for tensor in wanted}, False
    seen, stack = set[Any](), [total.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise HetpipeError(
                f"loss_fn computes with a parameter {list(variable.shape)} that is not its own, "
                "which loss_over='mini-batch' would not train: make loss_fn a module that has the "
                "parameter, or let the model return what depends on it"
            )
        found = found or variable is not None
        stack += [parent for parent, _ in node.next_functions]
    if not found:
        raise HetpipeError(
            "no gradient of the loss reaches the model's output or a parameter of the loss: check "
            "detach and no_grad in loss_fn"
        )
