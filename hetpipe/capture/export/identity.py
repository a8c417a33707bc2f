"""Identity of a capture: when two captures, of two starts of a program, give the same graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from hetpipe.capture.export.attributes import kept_names
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.repeatability import (
    check_repeatable,
    generators_of,
    restored_generators,
)
from hetpipe.capture.export.signature import Rehearsal
from hetpipe.capture.export.source_files import (
    UnknownCodeError,
    digest_of,
    identity,
    library_digest,
)
from hetpipe.capture.export.torch_export import recordable, with_loss
from hetpipe.capture.export.training_modes import Modes
from hetpipe.entries import key_of

if TYPE_CHECKING:
    from hetpipe.capture.program import Decompositions
    from hetpipe.optim.rule import Optimizer


COMPOSED = "torch._export.utils"


class Identity:
    """Keys for what is captured of a model and a loss, with some `options`.

    A key is None where it cannot be told whether the code is the same as at another time.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        example: Example,
        modes: Modes,
        options: Sequence[object],
        seen: Callable[[int, bool, Any], None],
    ) -> None:
        """`seen` is called with a size, the mode and the model's output at that size."""
        self._seen = seen
        self._model, self._loss_fn, self._example, self._modes = model, loss_fn, example, modes
        self.changed: frozenset[tuple[str, str]] | None = None
        """The attributes that calls change without an effect on later calls: (module, name); None
        if no call was rehearsed."""
        self._checked: set[bool] = set()
        self._signatures: dict[tuple[int, bool], str | None] = {}
        self._sources = digest_of(model, loss_fn)
        self._parts = (
            library_digest(), self._sources, example.structure, list(options),
            [training for _, training in modes.training],
            [(name, _described(p)) for name, p in model.named_parameters(remove_duplicate=False)],
            [(name, _described(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        )  # fmt: skip

    def key(self, kind: str, samples: Sequence[int], training: bool, *more: object) -> str | None:
        """The key of content that depends on micro-batches of these sizes, and on `more`.

        Raises `CaptureError` for a model whose next call would do something else.
        """
        signatures = [self._signature(size, training) for size in samples]
        if self._sources is None or None in signatures:
            return None
        return key_of(kind, list(samples), training, signatures, self._parts, *more)

    def check_computing(self, samples: int, training: bool) -> None:
        """Check by computing what a rehearsal without values could not.

        Raises `CaptureError` for a model whose next call would do something else.
        """
        if training not in self._checked:
            with kept_names(self._model, self._loss_fn):
                rehearsal = self._rehearsal(samples, training, computes=True)
                if rehearsal is not None:
                    self._check(rehearsal, training)

    def _signature(self, samples: int, training: bool) -> str | None:
        if (samples, training) not in self._signatures:
            with kept_names(self._model, self._loss_fn):
                rehearsal = self._rehearsal(samples, training)
                signature = None if rehearsal is None else rehearsal.calls[0].signature
                self._signatures[samples, training] = signature
                if rehearsal is not None and training not in self._checked:
                    self._check(rehearsal, training)
        return self._signatures[samples, training]

    def _rehearsal(self, samples: int, training: bool, computes: bool = False) -> Rehearsal | None:
        """The rehearsal after its first call; None where there can be none."""
        with self._modes.restored(evaluation=not training), recordable():
            run = with_loss(
                self._model, self._loss_fn, self._example,
                lambda out: self._seen(samples, training, out),  # no copy of it is made
            )  # fmt: skip
            try:
                rehearsal = Rehearsal(run, self._example.tensors(samples), computes)
                with restored_generators(generators_of(rehearsal.run)):
                    rehearsal.call()
            except Exception:  # the export will say what is wrong, if anything is
                return None
        return rehearsal

    def _check(self, rehearsal: Rehearsal, training: bool) -> None:
        with recordable():
            self.changed = (self.changed or frozenset()) | check_repeatable(rehearsal)
        self._checked.add(training)


def tables_identity(tables: Sequence[Decompositions]) -> object:
    """Of decompositions of each stage. Raises `UnknownCodeError`."""
    distinct = {id(table): table for table in tables}
    known = {key: _table_identity(table) for key, table in distinct.items()}
    return [known[id(table)] for table in tables]


def optimizer_identity(optimizer: Optimizer | None, names: Sequence[str]) -> object:
    """Of an optimizer, for parameters of these names. Raises `UnknownCodeError`."""
    if optimizer is None:
        return None
    rules = [optimizer] if optimizer.undecayed is None else [optimizer, optimizer.undecayed]
    undecayed = [name for name in names if optimizer.rule_for(name) is not optimizer]
    functions = [
        None if function is None else identity(function)
        for rule in rules
        for function in (rule.update, rule.predict)
    ]
    return optimizer.state, functions, undecayed


def _table_identity(table: Mapping[Any, Callable[..., Any]]) -> object:
    """Without torch's own entries for operators that are made of others: there is one for each of
    the operators of this kind that happen to be imported."""
    return sorted(
        (str(operator), repr(_of(function)))
        for operator, function in table.items()
        if not (isinstance(function, partial) and function.func.__module__ == COMPOSED)
    )


def _of(function: Any) -> object:
    try:
        return identity(function)
    except UnknownCodeError:
        raise
    except Exception as error:  # a function with other things in its closure
        raise UnknownCodeError(repr(function)) from error


def _described(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad
