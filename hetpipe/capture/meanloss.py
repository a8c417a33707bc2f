"""Checks that a loss is a mean over samples, or a sum with a count, as micro-batches presume.

The loss of some rows is compared with the losses of their two halves, by value and by gradient. A
loss depends on the model's output alone, so random outputs of the right shapes serve as well as
true ones, and the model need not run. It runs where it returns the loss itself, and before a
refusal.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hetpipe.capture.attributes import kept_attributes, names_module
from hetpipe.capture.example import Example
from hetpipe.capture.export import run_loss, run_model
from hetpipe.capture.indices import IndexBound
from hetpipe.capture.outputs import Outputs
from hetpipe.capture.tensors import deep_copy

LIMIT = 1e-3
"""The largest relative difference of a loss or its gradients between a whole and its parts."""
_RANDOM = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.MultiheadAttention,
           nn.RNNBase)  # fmt: skip
"""Modules that draw random numbers in training, or mix samples."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CURE = (
    "a micro-batch would weigh its samples wrong: return (sum, count) instead, as in (F.cross_"
    "entropy(out, y, reduction='sum'), (y != -100).sum()), or give microbatches=1"
)


class LossWarning(UserWarning):
    """The loss could not be compared between a mini-batch and its micro-batches."""


class LossCheck:
    """Compares the loss of `2 * samples` rows of the example with those of both halves."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: Example,
        bounds: Sequence[IndexBound],
        samples: int,
    ) -> None:
        self._model, self._loss_fn, self._example = model, loss_fn, example
        self._labels = [bound for bound in bounds if bound.ignored is not None]
        self._samples = samples

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
            for leaves in (self._rows(), self._drawn_rows()):
                if self._agrees(outputs, leaves):
                    continue
                try:
                    if fault := self._of_true_outputs(leaves, modules):
                        return fault
                except Exception as error:
                    failure = error
            if names_module(self._loss_fn, self._model):
                try:
                    return self._of_attributes()
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            self._warn(failure)
        return ""

    def _warn(self, failure: Exception) -> None:
        text = str(failure).splitlines()[0] if str(failure) else ""
        warnings.warn(
            f"loss_fn(model(x), y) fails for {2 * self._samples} samples at once "
            f"({type(failure).__name__}: {text}), so it is not known whether the loss is a mean "
            "over samples, as micro-batches need it",
            LossWarning,
            stacklevel=2,
        )

    def _of_attributes(self) -> str:
        """Compare runs of the model itself: the loss may read what `forward` keeps in it."""
        model, leaves = self._model, self._drawn_rows()
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

    def _rows(self) -> list[Tensor]:
        return self._example.tensors(2 * self._samples)

    def _drawn_rows(self) -> list[Tensor]:
        """Rows in another order, and with other labels: in the example all may be of one class."""
        order = torch.randperm(2 * self._samples)
        leaves = dict(zip(self._example.names, self._rows(), strict=True))
        leaves = {name: leaf[order].clone() for name, leaf in leaves.items()}
        for bound in self._labels:
            leaves[bound.leaf] = _relabelled(leaves[bound.leaf], bound)
        for name, leaf in leaves.items():
            if name[0] == "y" and leaf.dtype not in _INTEGERS and bool((leaf == 1).all()):
                leaves[name] = torch.randint(2, leaf.shape).to(leaf.dtype)  # a mask, maybe
        return list(leaves.values())

    def _agrees(self, outputs: Outputs | None, leaves: list[Tensor]) -> bool:
        """Whether the loss of random outputs is known to be the mean of its parts."""
        if outputs is None:
            return False
        compared = self._compare_drawn(outputs, leaves)
        return bool(compared) and all(each.agrees for each in compared)

    def _compare_drawn(
        self, outputs: Outputs, leaves: list[Tensor], *, seed: int = 0
    ) -> list[_Compared]:
        """Compare for random outputs, several ones where that is cheap: a loss that compares
        samples may agree by luck. Empty if the loss asks more of its outputs than these meet."""
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            drawn = [outputs.drawn(2 * self._samples) for _ in range(outputs.draws)]
        try:
            return [
                self._compare(each, outputs.spec, leaves, seed=seed)
                for each in drawn
                if each is not None
            ]
        except Exception:
            return []

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
                for part in (leaves, *self._halves(leaves))
            ]
        (whole, spec), (first, _), (second, _) = runs
        if all(map(self._is_joinable, whole, first, second)):
            joined = [
                torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0]
                for parts in zip(first, second, strict=True)
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
            else self._of_drawn(Outputs.of(tree_unflatten(joined, spec), 2 * self._samples), leaves)
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

    def _is_joinable(self, whole: Any, first: Any, second: Any) -> bool:
        if isinstance(whole, Tensor):
            sizes = [tuple(leaf.shape[:1]) for leaf in (whole, first, second)]
            return sizes == [(2 * self._samples,), (self._samples,), (self._samples,)]
        return whole is None or (isinstance(whole, (bool, str, float)) and whole == first)

    def _halves(self, leaves: Sequence[Any]) -> list[list[Any]]:
        count = self._samples

        def half(leaf: Any, lo: int) -> Any:
            return leaf[lo : lo + count] if isinstance(leaf, Tensor) else leaf

        return [[half(leaf, lo) for leaf in leaves] for lo in (0, count)]

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
            halves = zip(self._halves(output), self._halves(leaves), strict=True)
            parts = [total(own, part) for own, part in halves]
            joined = _joined(parts)
            gradients = [_gradient(value[0], sources) for value in (whole, joined)]
        norm = float(gradients[0].norm())
        difference = float((gradients[0] - gradients[1]).norm()) / max(norm, 1e-30)
        known = math.isfinite(norm)  # else training itself will say that it is not
        return _Compared(_floats(whole), _floats(joined), difference if known else 0.0)

    def _compare_runs(self, model: nn.Module, leaves: list[Tensor], *, seed: int) -> _Compared:
        """Compare where the model returns the loss, or outputs that cannot be divided."""

        def total(part: list[Tensor]) -> tuple[Tensor, ...]:
            torch.manual_seed(seed)
            x, y = self._example.rebuild(part)
            return _totals(run_loss(self._loss_fn, run_model(model, x), y))

        with torch.no_grad():
            joined = _joined([total(part) for part in self._halves(leaves)])
            return _Compared(_floats(total(leaves)), _floats(joined), 0.0)


@dataclass(frozen=True)
class _Compared:
    """The loss, or sum and count, of a whole and of its parts; the relative difference of their
    gradients."""

    whole: tuple[float, ...]
    parts: tuple[float, ...]
    gradient: float

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
        if len(self.whole) == 2:
            (a, count), (b, counts) = self.whole, self.parts
            return (
                f"loss_fn returns (sum, count), but for {2 * samples} samples it is ({a:.6g}, "
                f"{count:.6g}) and for their 2 micro-batches of {samples} together ({b:.6g}, "
                f"{counts:.6g}): sums and counts of parts must add up to those of the whole; "
                "return the sum over samples, or tokens, and their number, or give microbatches=1"
            )
        apart = f" (their gradients differ by {self.gradient:.0%})" if self.gradient > LIMIT else ""
        return (
            f"the loss is no mean over samples: for {2 * samples} samples it is "
            f"{self.whole[0]:.6g}, and the mean over their 2 micro-batches of {samples} is "
            f"{self.parts[0]:.6g}{apart}; {_CURE}"
        )


def _totals(loss: Any) -> tuple[Tensor, ...]:
    """The loss, or sum and count."""
    values = loss if isinstance(loss, tuple) else (loss,)
    return tuple(torch.as_tensor(value) for value in values)


def _joined(parts: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """The mean of the parts' losses, or their sums and counts added up."""
    sums = tuple(first + second for first, second in zip(*parts, strict=True))
    return sums if len(sums) == 2 else (sums[0] / 2,)


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


def _relabelled(leaf: Tensor, bound: IndexBound) -> Tensor:
    """The leaf with random class numbers in place of its own; ignored labels stay."""
    assert bound.ignored is not None
    classes = torch.arange(bound.low, bound.high)
    classes = classes[classes != bound.ignored]
    if len(classes) < 2:
        return leaf
    rows = leaf.reshape(leaf.shape[0], -1)
    columns = slice(None) if bound.columns is None else list(bound.columns)
    drawn = rows.clone()
    drawn[:, columns] = classes[torch.randint(len(classes), drawn[:, columns].shape)].to(leaf.dtype)
    ignored = rows.eq(bound.ignored)
    return torch.where(ignored, rows, drawn).reshape(leaf.shape)


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
