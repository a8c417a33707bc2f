"""Checks that a loss is a mean over samples, or a sum with a count, as micro-batches need it.

The check compares two losses by value and by gradient: the loss of some joined micro-batches, and
the mean (or the sums) of their single losses. A loss usually depends only on the model's output, so
random outputs of the right shapes are enough. The model itself runs only before a refusal, if
its outputs cannot be drawn (a loss, for example), or if the loss refers to the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.capture.export.attributes import keep_attributes, names_module
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.index_bounds import IndexBound
from hetpipe.capture.export.loss_batches import LossBatches
from hetpipe.capture.export.named_tensors import deep_copy
from hetpipe.capture.export.outputs import Outputs
from hetpipe.capture.export.torch_export import run_loss, run_model

LIMIT = 1e-3
"""Losses agree up to this relative difference, and so do their gradients."""
FEW_ELEMENTS, MANY_ELEMENTS = 50_000, 1_000_000
"""Random outputs with fewer than FEW_ELEMENTS are drawn several times. Outputs with MANY_ELEMENTS
or more are drawn for two micro-batches only, because their losses take long."""
PARTS = 8
"""Maximum number of micro-batches with random labels, or to run if outputs cannot be drawn."""
_RANDOM = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention,
           nn.RNNBase)  # fmt: skip
"""Modules that draw random numbers in training, or mix samples."""
_CURE = (
    "a micro-batch would weigh its samples wrong: return (sum, count) instead, as in (F.cross_"
    "entropy(out, y, reduction='sum'), (y != -100).sum()), or give loss_over='mini-batch' or "
    "microbatches=1"
)


class LossWarning(UserWarning):
    """hetpipe could not compare the loss of a mini-batch with the losses of its micro-batches."""


class LossCheck:
    """Compares the loss of joined micro-batches of `samples` with their single losses."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: Example,
        bounds: Sequence[IndexBound],
        samples: int,
    ) -> None:
        self._model, self._loss_fn, self._example = model, loss_fn, example
        self._rows, self._samples = LossBatches(example, bounds, samples), samples

    def fault(self, outputs: Outputs | None) -> str:
        """Return a sentence with the two losses, or "" if they agree.

        The random number generator keeps its state. Warns with `LossWarning` if the loss fails for
        random outputs and for true outputs.
        """
        modules = [*self._model.modules()]
        if isinstance(self._loss_fn, nn.Module):
            modules += self._loss_fn.modules()
        failure: Exception | None = None
        with torch.random.fork_rng(devices=()), _eval_mode(modules, _RANDOM):
            torch.manual_seed(0)
            rows, few = self._rows, PARTS if self._rows.has_few_labels else 2
            for draw, most in ((rows.from_example, rows.count), (rows.draw, few)):
                leaves = draw(2 if self._is_long(outputs, most) else most)
                agrees = self._agrees(outputs, leaves)
                if agrees is None:
                    leaves = draw(min(most, few))
                try:
                    if not agrees and (fault := self._compare_true_outputs(leaves, modules)):
                        return fault
                except Exception as error:
                    failure = error
            if names_module(self._loss_fn, self._model):
                try:
                    return self._compare_attributes(rows.draw(2))
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            self._warn(failure)
        return ""

    def _warn(self, failure: Exception) -> None:
        text = str(failure).splitlines()[0] if str(failure) else ""
        warnings.warn(
            f"loss_fn(model(x), y) fails for several micro-batches of {self._samples} at once "
            f"({type(failure).__name__}: {text}), so it is not known whether the loss is a mean "
            "over samples, as micro-batches need it",
            LossWarning,
            stacklevel=2,
        )

    def _compare_attributes(self, leaves: list[Tensor]) -> str:
        """Compare runs of the model itself: the loss may read attributes that `forward` sets."""
        model = self._model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            for kinds in (_RANDOM, (nn.Module,)):
                with keep_attributes(model), _eval_mode([*model.modules()], kinds):
                    first, again = (self._compare_runs(model, leaves, seed=seed) for seed in (0, 1))
                if first.whole == again.whole:  # otherwise the loss is random
                    return "" if first.agrees else first.sentence(self._samples)
            return ""
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)

    def _is_long(self, outputs: Outputs | None, count: int) -> bool:
        """Return whether the losses of random outputs of `count` micro-batches take long."""
        return outputs is None or outputs.elements(count * self._samples) >= MANY_ELEMENTS

    def _agrees(self, outputs: Outputs | None, leaves: list[Tensor]) -> bool | None:
        """Return whether the losses of random outputs and their parts agree; None if unknown."""
        compared = [] if outputs is None else self._compare_random(outputs, leaves)
        return all(comparison.agrees for comparison in compared) if compared else None

    def _compare_random(
        self, outputs: Outputs, leaves: list[Tensor], *, seed: int = 0
    ) -> list[_Comparison]:
        """Compare the losses of one random output, or of several if that is cheap.

        If the loss compares samples, the losses of a single output may agree by chance. Outputs for
        which the loss raises an error do not count.
        """
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            rows = len(leaves[0])
            is_cheap = rows <= PARTS * self._samples and outputs.elements(rows) < FEW_ELEMENTS
            widths = (False, False, False, True) if is_cheap else (False,)
            drawn = [outputs.draw(rows, is_wide) for is_wide in widths]
        compared = []
        for output in drawn:
            if output is not None:
                with suppress(Exception):
                    compared.append(self._compare(output, outputs.spec, leaves, seed=seed))
        return compared

    def _compare_true_outputs(self, leaves: list[Tensor], modules: list[nn.Module]) -> str:
        """Compare the losses of the model's true outputs, with its random modules in eval mode."""
        model = deep_copy(self._model, self._model.parameters())
        with _eval_mode([*model.modules()], _RANDOM):
            fault = self._run(model, leaves)
        if fault is None:  # other modules draw random numbers
            with _eval_mode([*model.modules(), *modules], (nn.Module,)):
                fault = self._run(model, leaves)
        return fault or ""

    def _run(self, model: nn.Module, leaves: list[Tensor]) -> str | None:
        """Return the fault, "" if there is none, or None if the loss itself is random."""
        with torch.no_grad():
            runs = [
                tree_flatten(run_model(model, self._example.rebuild(part)[0]))
                for part in (leaves, *self._parts(leaves))
            ]
        (whole, spec), *part_runs = runs
        parts = [part for part, _ in part_runs]
        if all(map(self._is_joinable, whole, *parts)):
            joined = [
                torch.cat(leaf) if isinstance(leaf[0], Tensor) else leaf[0]
                for leaf in zip(*parts, strict=True)
            ]
            compare = partial(self._compare, joined, spec, leaves)
        else:
            joined = []
            compare = partial(self._compare_runs, model, leaves)
        compared = compare(seed=0)
        if not compared.agrees:
            is_random = compare(seed=1).whole != compared.whole
            return None if is_random else compared.sentence(self._samples)
        return (
            ""
            if not joined
            else self._check_random_outputs(
                Outputs.of(tree_unflatten(joined, spec), len(leaves[0])), leaves
            )
        )

    def _check_random_outputs(self, outputs: Outputs, leaves: list[Tensor]) -> str | None:
        """Do as `_run` with random outputs, since outputs of an untrained model hardly differ."""
        first, again = (self._compare_random(outputs, leaves, seed=seed) for seed in (0, 1))
        for one, two in zip(first, again, strict=False):
            if not one.agrees:
                if one.whole != two.whole:
                    return None
                return f"{one.sentence(self._samples)} (losses of random outputs)"
        return ""

    def _is_joinable(self, whole: Any, *parts: Any) -> bool:
        if isinstance(whole, Tensor):
            sizes = {tuple(part.shape[:1]) for part in parts}
            return sizes == {(self._samples,)} and len(whole) == len(parts) * self._samples
        return whole is None or (isinstance(whole, (bool, str, float)) and whole == parts[0])

    def _parts(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """Return the leaves of each micro-batch."""
        rows = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))

        def part(leaf: Any, lo: int) -> Any:
            return leaf[lo : lo + self._samples] if isinstance(leaf, Tensor) else leaf

        return [[part(leaf, lo) for leaf in leaves] for lo in range(0, rows, self._samples)]

    def _compare(
        self, output: list[Any], spec: TreeSpec, leaves: list[Tensor], *, seed: int = 0
    ) -> _Comparison:
        """Compare the losses of one output, whole and in micro-batches, by value and gradient."""
        sources = [
            leaf.detach().requires_grad_()
            for leaf in output
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        remaining = iter(sources)
        output = [
            next(remaining) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
            for leaf in output
        ]

        def total(own: list[Any], part: list[Tensor]) -> tuple[Tensor, ...]:
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in own]
            torch.manual_seed(seed)
            y = self._example.rebuild(part)[1]
            return _totals(run_loss(self._loss_fn, tree_unflatten(own, spec), y))

        with torch.enable_grad():
            whole = total(output, leaves)
            pairs = zip(self._parts(output), self._parts(leaves), strict=True)
            parts = [total(own, part) for own, part in pairs]
            joined = _combine(parts)
            gradients = [_gradient(value[0], sources) for value in (whole, joined)]
        norm = float(gradients[0].norm())
        difference = float((gradients[0] - gradients[1]).norm()) / max(norm, 1e-30)
        known = math.isfinite(norm)  # training reports infinite gradients itself
        return _Comparison(
            _floats(whole), _floats(joined), difference if known else 0.0, len(parts)
        )

    def _compare_runs(self, model: nn.Module, leaves: list[Tensor], *, seed: int) -> _Comparison:
        """Compare runs of the model, for outputs that cannot be divided (a loss, for example)."""

        def total(part: list[Tensor]) -> tuple[Tensor, ...]:
            torch.manual_seed(seed)
            x, y = self._example.rebuild(part)
            return _totals(run_loss(self._loss_fn, run_model(model, x), y))

        with torch.no_grad():
            parts = [total(part) for part in self._parts(leaves)]
            return _Comparison(_floats(total(leaves)), _floats(_combine(parts)), 0.0, len(parts))


@dataclass(frozen=True)
class _Comparison:
    """The loss, or (sum, count), of a whole and of its `count` parts."""

    whole: tuple[float, ...]
    parts: tuple[float, ...]
    gradient: float  # relative difference of the gradients of whole and parts
    count: int

    @property
    def agrees(self) -> bool:
        """Whether losses and gradients agree, or the loss of the whole is not finite."""
        if not all(map(math.isfinite, self.whole)):
            return True
        pairs = zip(self.whole, self.parts, strict=True)
        near = all(math.isclose(a, b, rel_tol=LIMIT, abs_tol=1e-6) for a, b in pairs)
        return near and self.gradient <= LIMIT

    def sentence(self, samples: int) -> str:
        """Return the fault with both numbers, and the cure."""
        whole = f"for {self.count * samples} samples it is"
        parts = f"their {self.count} micro-batches of {samples}"
        if len(self.whole) == 2:
            (a, count), (b, counts) = self.whole, self.parts
            return (
                f"loss_fn returns (sum, count), but {whole} ({a:.6g}, {count:.6g}) and for {parts} "
                f"together ({b:.6g}, {counts:.6g}): sums and counts of parts must add up to the "
                "sum and count of the whole; return the sum over samples, or tokens, and their "
                "number, or give microbatches=1"
            )
        apart = f" (their gradients differ by {self.gradient:.0%})" if self.gradient > LIMIT else ""
        return (
            f"the loss is no mean over samples: {whole} {self.whole[0]:.6g}, and the mean over "
            f"{parts} is {self.parts[0]:.6g}{apart}; {_CURE}"
        )


def _totals(loss: Any) -> tuple[Tensor, ...]:
    """Return the loss, or sum and count."""
    values = loss if isinstance(loss, tuple) else (loss,)
    return tuple(torch.as_tensor(value) for value in values)


def _combine(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the mean of the parts' losses, or the totals of their sums and counts."""
    sums = tuple(torch.stack(values).sum(0) for values in zip(*parts, strict=True))
    return sums if len(sums) == 2 else (sums[0] / len(parts),)


def _floats(values: tuple[Tensor, ...]) -> tuple[float, ...]:
    return tuple(float(value.detach()) for value in values)


def _gradient(loss: Tensor, sources: list[Tensor]) -> Tensor:
    """Return the gradient of a loss with respect to all sources, flattened and joined."""
    if not (sources and loss.requires_grad):
        return torch.zeros(1)
    grads = torch.autograd.grad(loss, sources, allow_unused=True)
    pairs = zip(grads, sources, strict=True)
    rows = [torch.zeros_like(source) if grad is None else grad for grad, source in pairs]
    return torch.cat([row.reshape(-1).to(torch.float64) for row in rows])


@contextmanager
def _eval_mode(modules: list[nn.Module], kinds: tuple[type, ...]) -> Iterator[None]:
    """Put modules of these kinds into eval mode inside the block."""
    present = [(module, module.training) for module in modules if isinstance(module, kinds)]
    try:
        for module, _ in present:
            module.training = False  # eval() is not called: models may override it
        yield
    finally:
        for module, training in present:
            module.training = training
