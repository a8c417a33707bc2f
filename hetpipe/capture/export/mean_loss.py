"""Checks that a loss is a mean over samples, or a sum with a count, as micro-batches presume.

The loss of some micro-batches together is compared with the losses of each, by value and by
gradient. A loss depends on the model's output alone, so random outputs of the right shapes serve as
well as true ones, and the model need not run. It runs where it returns the loss itself, and before
a refusal.
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

from hetpipe.capture.export.attributes import kept_attributes, names_module
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.index_bounds import IndexBound
from hetpipe.capture.export.loss_batches import Rows
from hetpipe.capture.export.named_tensors import deep_copy
from hetpipe.capture.export.outputs import Outputs
from hetpipe.capture.export.torch_export import run_loss, run_model

LIMIT = 1e-3
"""The largest relative difference of a loss or its gradients between a whole and its parts."""
FEW_ELEMENTS, MANY_ELEMENTS = 50_000, 1_000_000
"""Random outputs with fewer elements are drawn several times, those with more for two micro-batches
alone: their losses take long."""
PARTS = 8
"""The most micro-batches that have drawn labels, or for which the model itself runs."""
_RANDOM = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention,
           nn.RNNBase)  # fmt: skip
"""Modules that draw random numbers in training, or mix samples."""
_CURE = (
    "a micro-batch would weigh its samples wrong: return (sum, count) instead, as in (F.cross_"
    "entropy(out, y, reduction='sum'), (y != -100).sum()), or give microbatches=1"
)


class LossWarning(UserWarning):
    """The loss could not be compared between a mini-batch and its micro-batches."""


class LossCheck:
    """Compares the loss of some micro-batches of `samples` together with the losses of each."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: Example,
        bounds: Sequence[IndexBound],
        samples: int,
    ) -> None:
        self._model, self._loss_fn, self._example = model, loss_fn, example
        self._rows, self._samples = Rows(example, bounds, samples), samples

    def fault(self, outputs: Outputs | None) -> str:
        """A sentence with the loss of the whole and the mean of its parts, if they differ; else "".

        The generator of random numbers is left as it was. Warns with `LossWarning` if the loss can
        be computed for neither random nor true outputs.
        """
        modules = [*self._model.modules()]
        if isinstance(self._loss_fn, nn.Module):
            modules += self._loss_fn.modules()
        failure: Exception | None = None
        with torch.random.fork_rng(devices=()), _quiet(modules, _RANDOM):
            torch.manual_seed(0)
            rows, few = self._rows, PARTS if self._rows.has_few_labels else 2
            for draw, most in ((rows.given, rows.count), (rows.drawn, few)):
                leaves = draw(2 if self._is_long(outputs, most) else most)
                agrees = self._agrees(outputs, leaves)
                if agrees is None:
                    leaves = draw(min(most, few))
                try:
                    if not agrees and (fault := self._of_true_outputs(leaves, modules)):
                        return fault
                except Exception as error:
                    failure = error
            if names_module(self._loss_fn, self._model):
                try:
                    return self._of_attributes(rows.drawn(2))
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

    def _of_attributes(self, leaves: list[Tensor]) -> str:
        """Compare runs of the model itself: the loss may read what `forward` keeps in it."""
        model = self._model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        try:
            for kinds in (_RANDOM, (nn.Module,)):
                with kept_attributes(model), _quiet([*model.modules()], kinds):
                    first, again = (self._compare_runs(model, leaves, seed=seed) for seed in (0, 1))
                if first.whole == again.whole:  # else it is random
                    return "" if first.agrees else first.sentence(self._samples)
            return ""
        finally:
            for buffer, value in buffers:
                buffer.copy_(value)

    def _is_long(self, outputs: Outputs | None, count: int) -> bool:
        """Whether losses of random outputs of `count` micro-batches take long."""
        return outputs is None or outputs.elements(count * self._samples) >= MANY_ELEMENTS

    def _agrees(self, outputs: Outputs | None, leaves: list[Tensor]) -> bool | None:
        """Whether the loss of random outputs is the mean of its parts; None if it has none."""
        compared = [] if outputs is None else self._compare_drawn(outputs, leaves)
        return all(each.agrees for each in compared) if compared else None

    def _compare_drawn(
        self, outputs: Outputs, leaves: list[Tensor], *, seed: int = 0
    ) -> list[_Compared]:
        """Compare for random outputs, several ones where that is cheap: a loss that compares
        samples may agree by luck. Without those for which the loss fails, as it asks more."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            rows = len(leaves[0])
            is_cheap = rows <= PARTS * self._samples and outputs.elements(rows) < FEW_ELEMENTS
            widths = (False, False, False, True) if is_cheap else (False,)
            drawn = [outputs.drawn(rows, is_wide) for is_wide in widths]
        compared = []
        for each in drawn:
            if each is not None:
                with suppress(Exception):
                    compared.append(self._compare(each, outputs.spec, leaves, seed=seed))
        return compared

    def _of_true_outputs(self, leaves: list[Tensor], modules: list[nn.Module]) -> str:
        """Compare for the outputs of the model itself, which does not draw random numbers."""
        model = deep_copy(self._model, self._model.parameters())
        with _quiet([*model.modules()], _RANDOM):
            fault = self._run(model, leaves)
        if fault is None:  # random numbers elsewhere in the model
            with _quiet([*model.modules(), *modules], (nn.Module,)):
                fault = self._run(model, leaves)
        return fault or ""

    def _run(self, model: nn.Module, leaves: list[Tensor]) -> str | None:
        """The fault, "" if there is none, or None if the loss itself is random."""
        with torch.no_grad():
            runs = [
                tree_flatten(run_model(model, self._example.rebuild(part)[0]))
                for part in (leaves, *self._parts(leaves))
            ]
        (whole, spec), *rest = runs
        parts = [part for part, _ in rest]
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
            else self._of_drawn(Outputs.of(tree_unflatten(joined, spec), len(leaves[0])), leaves)
        )

    def _of_drawn(self, outputs: Outputs, leaves: list[Tensor]) -> str | None:
        """As `_run`, for random outputs: those of an untrained model are nearly all the same."""
        first, again = (self._compare_drawn(outputs, leaves, seed=seed) for seed in (0, 1))
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
        """The leaves of each micro-batch."""
        rows = next(len(leaf) for leaf in leaves if isinstance(leaf, Tensor))

        def part(leaf: Any, lo: int) -> Any:
            return leaf[lo : lo + self._samples] if isinstance(leaf, Tensor) else leaf

        return [[part(leaf, lo) for leaf in leaves] for lo in range(0, rows, self._samples)]

    def _compare(
        self, output: list[Any], spec: TreeSpec, leaves: list[Tensor], *, seed: int = 0
    ) -> _Compared:
        """Compare for outputs of all rows, by value and by the gradient of the outputs."""
        sources = [
            leaf.detach().requires_grad_()
            for leaf in output
            if isinstance(leaf, Tensor) and leaf.is_floating_point()
        ]
        rest = iter(sources)
        output = [
            next(rest) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
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
            joined = _joined(parts)
            gradients = [_gradient(value[0], sources) for value in (whole, joined)]
        norm = float(gradients[0].norm())
        difference = float((gradients[0] - gradients[1]).norm()) / max(norm, 1e-30)
        known = math.isfinite(norm)  # else training itself will say that it is not
        return _Compared(_floats(whole), _floats(joined), difference if known else 0.0, len(parts))

    def _compare_runs(self, model: nn.Module, leaves: list[Tensor], *, seed: int) -> _Compared:
        """Compare where the model returns the loss, or outputs that cannot be divided."""

        def total(part: list[Tensor]) -> tuple[Tensor, ...]:
            torch.manual_seed(seed)
            x, y = self._example.rebuild(part)
            return _totals(run_loss(self._loss_fn, run_model(model, x), y))

        with torch.no_grad():
            parts = [total(part) for part in self._parts(leaves)]
            return _Compared(_floats(total(leaves)), _floats(_joined(parts)), 0.0, len(parts))


@dataclass(frozen=True)
class _Compared:
    """The loss, or sum and count, of a whole and of its `count` parts; the relative difference of
    their gradients."""

    whole: tuple[float, ...]
    parts: tuple[float, ...]
    gradient: float
    count: int

    @property
    def agrees(self) -> bool:
        """Whether they are equal but for rounding; also where the whole has no finite loss."""
        if not all(map(math.isfinite, self.whole)):
            return True
        pairs = zip(self.whole, self.parts, strict=True)
        near = all(math.isclose(a, b, rel_tol=LIMIT, abs_tol=1e-6) for a, b in pairs)
        return near and self.gradient <= LIMIT

    def sentence(self, samples: int) -> str:
        """The fault with both numbers, and the cure."""
        whole = f"for {self.count * samples} samples it is"
        parts = f"their {self.count} micro-batches of {samples}"
        if len(self.whole) == 2:
            (a, count), (b, counts) = self.whole, self.parts
            return (
                f"loss_fn returns (sum, count), but {whole} ({a:.6g}, {count:.6g}) and for {parts} "
                f"together ({b:.6g}, {counts:.6g}): sums and counts of parts must add up to those "
                "of the whole; return the sum over samples, or tokens, and their number, or give "
                "microbatches=1"
            )
        apart = f" (their gradients differ by {self.gradient:.0%})" if self.gradient > LIMIT else ""
        return (
            f"the loss is no mean over samples: {whole} {self.whole[0]:.6g}, and the mean over "
            f"{parts} is {self.parts[0]:.6g}{apart}; {_CURE}"
        )


def _totals(loss: Any) -> tuple[Tensor, ...]:
    """The loss, or sum and count."""
    values = loss if isinstance(loss, tuple) else (loss,)
    return tuple(torch.as_tensor(value) for value in values)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The mean of the parts' losses, or their sums and counts added up."""
    sums = tuple(torch.stack(values).sum(0) for values in zip(*parts, strict=True))
    return sums if len(sums) == 2 else (sums[0] / len(parts),)


def _floats(values: tuple[Tensor, ...]) -> tuple[float, ...]:
    return tuple(float(value.detach()) for value in values)


def _gradient(loss: Tensor, sources: list[Tensor]) -> Tensor:
    """The gradient of a loss with respect to all sources, in one row."""
    if not (sources and loss.requires_grad):
        return torch.zeros(1)
    grads = torch.autograd.grad(loss, sources, allow_unused=True)
    pairs = zip(grads, sources, strict=True)
    rows = [torch.zeros_like(own) if grad is None else grad for grad, own in pairs]
    return torch.cat([row.reshape(-1).to(torch.float64) for row in rows])


@contextmanager
def _quiet(modules: list[nn.Module], kinds: tuple[type, ...]) -> Iterator[None]:
    """Inside, modules of these kinds are in eval mode."""
    present = [(module, module.training) for module in modules if isinstance(module, kinds)]
    try:
        for module, _ in present:
            module.training = False  # not by eval(), which models override
        yield
    finally:
        for module, training in present:
            module.training = training
