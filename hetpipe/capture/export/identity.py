"""Computes the identity of a capture: equal keys mean equal graphs, also after a restart.

A capture depends on the source files of the model and the loss, and on all files that these files
reach through their globals.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hetpipe
from hetpipe.capture.export.attributes import keep_globals
from hetpipe.capture.export.example import Example
from hetpipe.capture.export.repeatability import (
    check_repeatable,
    generators_of,
    restore_generators,
)
from hetpipe.capture.export.signature import Rehearsal
from hetpipe.capture.export.torch_export import WithLoss, exportable_modules
from hetpipe.capture.export.training_modes import Modes
from hetpipe.entries import key_of

if TYPE_CHECKING:
    from hetpipe.capture.program import Decompositions
    from hetpipe.optim.rule import Optimizer


COMPOSED = "torch._export.utils"


class Identity:
    """Computes keys for the graphs that capture makes from a model and a loss.

    A key is None if hetpipe cannot tell whether the code is the same as at another time.
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
        """Each `Rehearsal` will call `seen` with (samples, training, the model's output)."""
        self._seen = seen
        self._model, self._loss_fn, self._example, self._modes = model, loss_fn, example, modes
        self.changed: frozenset[tuple[str, str]] | None = None
        """The attributes, as (module, name), that calls change without an effect on later calls;
        None before the first check."""
        self._checked: set[bool] = set()
        self._signatures: dict[tuple[int, bool], str | None] = {}
        self._sources = digest_of(model, loss_fn)
        self._parts = (
            library_digest(), self._sources, example.structure, list(options),
            [training for _, training in modes.training],
            [(name, _describe(p)) for name, p in model.named_parameters(remove_duplicate=False)],
            [(name, _describe(b)) for name, b in model.named_buffers(remove_duplicate=False)],
        )  # fmt: skip

    def key(self, kind: str, samples: Sequence[int], training: bool, *more: object) -> str | None:
        """Return the key of a cache entry for micro-batches of these sizes; `more` is part of it.

        Raises `CaptureError` for a model that would do something else at its next call.
        """
        signatures = [self._signature(size, training) for size in samples]
        if self._sources is None or None in signatures:
            return None
        return key_of(kind, list(samples), training, signatures, self._parts, *more)

    def check_computing(self, samples: int, training: bool) -> None:
        """If the rehearsal on meta tensors failed, rehearse on tensors with values.

        Raises `CaptureError` for a model that would do something else at its next call.
        """
        if training not in self._checked:
            with keep_globals(self._model, self._loss_fn):
                rehearsal = self._rehearsal(samples, training, computes=True)
                if rehearsal is not None:
                    self._check(rehearsal, training)

    def _signature(self, samples: int, training: bool) -> str | None:
        if (samples, training) not in self._signatures:
            with keep_globals(self._model, self._loss_fn):
                rehearsal = self._rehearsal(samples, training)
                signature = None if rehearsal is None else rehearsal.calls[0].signature
                self._signatures[samples, training] = signature
                if rehearsal is not None and training not in self._checked:
                    self._check(rehearsal, training)
        return self._signatures[samples, training]

    def _rehearsal(self, samples: int, training: bool, computes: bool = False) -> Rehearsal | None:
        """Return the rehearsal after its first call; None if the model cannot be rehearsed."""
        with self._modes.apply(evaluation=not training), exportable_modules():
            run = WithLoss(
                self._model, self._loss_fn, self._example,
                lambda out: self._seen(samples, training, out),  # deepcopy does not copy a lambda
            )  # fmt: skip
            try:
                rehearsal = Rehearsal(run, self._example.tensors(samples), computes)
                with restore_generators(generators_of(rehearsal.run)):
                    rehearsal.call()
            except Exception:  # the export will report the error
                return None
        return rehearsal

    def _check(self, rehearsal: Rehearsal, training: bool) -> None:
        with exportable_modules():
            self.changed = (self.changed or frozenset()) | check_repeatable(rehearsal)
        self._checked.add(training)


def tables_identity(tables: Sequence[Decompositions]) -> object:
    """Identify the decompositions of each stage. Raises `UnknownCodeError`."""
    distinct = {id(table): table for table in tables}
    known = {key: _table_identity(table) for key, table in distinct.items()}
    return [known[id(table)] for table in tables]


def optimizer_identity(optimizer: Optimizer | None, names: Sequence[str]) -> object:
    """Identify an optimizer, for parameters with these names. Raises `UnknownCodeError`."""
    if optimizer is None:
        return None
    functions = [
        None if function is None else identity(function)
        for rule in optimizer.rules
        for function in (rule.update, rule.predict)
    ]
    scalars = [optimizer.scalars[rule.lr] for rule in optimizer.rules]
    states = [rule.state for rule in optimizer.rules]
    return functions, states, scalars, optimizer.members(names)


def _table_identity(table: Mapping[Any, Callable[..., Any]]) -> object:
    """Identify a table, without the entries that torch adds for imported composite operators."""
    return sorted(
        (str(operator), repr(_function_identity(function)))
        for operator, function in table.items()
        if not (isinstance(function, partial) and function.func.__module__ == COMPOSED)
    )


def _function_identity(function: Any) -> object:
    try:
        return identity(function)
    except UnknownCodeError:
        raise
    except Exception as error:  # the function's closure holds a value without an identity
        raise UnknownCodeError(repr(function)) from error


def _describe(tensor: Any) -> tuple[object, ...]:
    return tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad


_VERSIONED = ("torch", "numpy", "hetpipe", "sympy")
"""Packages whose files no key contains; `library_digest` identifies them."""
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


class UnknownCodeError(Exception):
    """hetpipe cannot tell whether the code is the same as at another time."""


def digest_of(model: nn.Module, loss_fn: Callable[..., Any]) -> str | None:
    """Return a hash of the files that model and loss reach; None if some code has no file."""
    modules = [*model.modules(), *(loss_fn.modules() if isinstance(loss_fn, nn.Module) else ())]
    names = {type(module).__module__ for module in modules}
    names.add(getattr(loss_fn, "__module__", None) or type(loss_fn).__module__)
    digest = hashlib.sha256()
    for name in sorted(_reachable_modules(names)):
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or not file.endswith(".py"):
            return None
        try:
            content = Path(file).read_bytes()
        except OSError:
            return None
        digest.update(repr((name, len(content))).encode() + content)
    return digest.hexdigest()


@cache
def library_digest() -> str:
    """Return a hash of hetpipe's sources, and of the versions of Python, torch, numpy and sympy."""
    versions = (
        sys.version, torch.__version__, torch.version.git_version, version("numpy"),
        version("sympy"),
    )  # fmt: skip
    digest = hashlib.sha256(repr(versions).encode())
    backends = importlib.import_module("hetpipe.backends")
    for root in map(Path, (*hetpipe.__path__, *backends.__path__)):
        for file in sorted(root.rglob("*.py")):
            digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def identity(function: Any) -> object:
    """Return a value that is equal for two functions only if both do the same.

    Raises `UnknownCodeError` unless the function belongs to hetpipe, torch, numpy or sympy.
    """
    if isinstance(function, partial):
        settings = [*function.args, *function.keywords.values()]
        return identity(function.func), list(function.keywords), list(map(_identity_of, settings))
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not isinstance(module, str) or module.partition(".")[0] not in _VERSIONED or name is None:
        raise UnknownCodeError(repr(function))
    cells = () if module.startswith("torch") else getattr(function, "__closure__", None) or ()
    return module, name, tuple(_identity_of(cell.cell_contents) for cell in cells)


def _identity_of(value: Any) -> object:
    if isinstance(value, (int, float, str, type(None))):
        return value
    if isinstance(value, tuple):
        return tuple(map(_identity_of, value))
    if isinstance(value, torch._ops.OpOverload):
        return str(value)
    return identity(value)


def _reachable_modules(names: Iterable[str]) -> set[str]:
    """Return these modules and the modules that their globals reach, without versioned packages."""
    stack, reached = list(names), set[str]()
    while stack:
        name = stack.pop()
        module = sys.modules.get(name)
        if name in reached or module is None or _is_versioned(name, module):
            continue
        reached.add(name)
        for value in list(vars(module).values()):
            if isinstance(value, ModuleType):
                stack.append(value.__name__)
            elif isinstance(origin := getattr(value, "__module__", None), str):
                stack.append(origin)
    return reached


def _is_versioned(name: str, module: ModuleType) -> bool:
    top = name.partition(".")[0]
    if top in _VERSIONED or top in sys.builtin_module_names:
        return True
    file = getattr(module, "__file__", None)
    if file is None:
        return top in sys.stdlib_module_names and top != "__main__"
    if any(part in ("site-packages", "dist-packages") for part in Path(file).parts):
        return False
    return Path(file).is_relative_to(_STANDARD_LIBRARY)
