"""Checks a user's workload and the calls of its functions; messages name the user's code."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hetpipe
from hetpipe.errors import HetpipeError, UserCodeError
from hetpipe.zoo.workload import Workload

if TYPE_CHECKING:
    import torch

    from hetpipe.zoo.workload import Batch

HOME = str(Path(hetpipe.__file__).parent)
OURS = (HOME, str(importlib.__file__), "<frozen ")


@contextmanager
def run_user_code(where: str) -> Iterator[None]:
    """Run a user's code; turn every error except a `HetpipeError` into a `UserCodeError`."""
    try:
        yield
    except HetpipeError:
        raise
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"{where} failed\n{user_traceback(error)}") from error


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of hetpipe and of Python's import."""
    summary = traceback.TracebackException.from_exception(error)
    _cut(summary)
    whole = bool(summary.stack or summary.__cause__ or summary.__context__)
    return "".join(summary.format() if whole else summary.format_exception_only()).rstrip()


def _cut(summary: traceback.TracebackException) -> None:
    frames = [frame for frame in summary.stack if not frame.filename.startswith(OURS)]
    summary.stack = traceback.StackSummary.from_list(frames)
    for other in (summary.__cause__, summary.__context__):
        if other is not None:
            _cut(other)


def check_workload(where: str, workload: Any) -> Workload:
    """Check a factory's workload; return it with checks around `batches` and `validate`.

    `where` begins each message. Raises `HetpipeError` for a wrong field.
    """
    if not isinstance(workload, Workload):
        raise HetpipeError(
            f"{where} returned {_describe(workload)}; return hetpipe.Workload(model, loss_fn, "
            "batches)"
        )
    for field, right, cure in _rules(workload):
        if not right:
            value = _describe(getattr(workload, field))
            raise HetpipeError(f"{where}: Workload.{field} is {value}; give {cure}")
    batches, validate = workload.batches, workload.validate
    return replace(
        workload,
        batches=guard_batches(where, batches),
        validate=None if validate is None else _guarded_validate(where, validate),
    )


def _rules(workload: Workload) -> Iterator[tuple[str, bool, str]]:
    """Yield (field, whether its value is valid, the allowed values) for each field."""
    from torch import nn

    from hetpipe.optim.rule import Optimizer

    yield "model", isinstance(workload.model, nn.Module), "a torch.nn.Module, not its class"
    yield "loss_fn", callable(workload.loss_fn), "a function of the model's output and y"
    yield "batches", callable(workload.batches), "a function (mini_batch, seed) that yields (x, y)"
    yield "name", isinstance(workload.name, str), "a text"
    yield "mini_batch", _is_count(workload.mini_batch), "a whole number, 1 or more"
    optimizer = workload.optimizer
    ours = isinstance(optimizer, Optimizer) and not optimizer.tensors
    cure = "such as adamw(lr=1e-3), or None: optimizers of torch are for hp.Pipeline"
    yield "optimizer", ours or optimizer is None, f"one of hetpipe.optim, {cure}"
    validate, samples = workload.validate, workload.train_samples
    yield "validate", validate is None or callable(validate), "a function of the model, or None"
    yield "train_samples", samples is None or _is_count(samples), "a whole number, or None"
    texts = isinstance(workload.blocks, (tuple, list)) and all(
        isinstance(name, str) for name in workload.blocks
    )
    yield "blocks", texts, "a tuple of names of modules"


def guard_batches(
    where: str, batches: Callable[[int, int], Iterator[Batch]]
) -> Callable[[int, int], Iterator[Batch]]:
    """Return a function that yields the mini-batches of `batches` and checks each.

    The function raises `UserCodeError` if the user's code raises, and `HetpipeError` if the
    mini-batches end or a mini-batch is not a pair.
    """

    def guarded(mini_batch: int, seed: int) -> Iterator[Batch]:
        call = f"{where}: batches({mini_batch}, {seed})"
        with run_user_code(call):
            stream = batches(mini_batch, seed)
        if not hasattr(stream, "__iter__"):
            raise HetpipeError(f"{call} returned {_describe(stream)}; yield pairs (x, y)")
        with run_user_code(call):
            iterator = iter(stream)
        for number in count():
            with run_user_code(f"{call}, at mini-batch {number},"):
                try:
                    batch = next(iterator)
                except StopIteration:
                    raise HetpipeError(
                        f"{call} ended after {number} mini-batches, but it must never "
                        "end: repeat the data (while True)"
                    ) from None
            if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
                raise HetpipeError(
                    f"{call} yielded {_describe(batch)} as mini-batch {number}; yield pairs (x, y)"
                )
            yield batch[0], batch[1]

    return guarded


def _guarded_validate(
    where: str, validate: Callable[[torch.nn.Module], dict[str, float]]
) -> Callable[[torch.nn.Module], dict[str, float]]:
    def guarded(model: torch.nn.Module) -> dict[str, float]:
        with run_user_code(f"{where}: validate(model)"):
            figures: Any = validate(model)
            if isinstance(figures, Mapping):
                return {str(name): float(figure) for name, figure in figures.items()}
        raise HetpipeError(
            f"{where}: validate(model) returned {_describe(figures)}; return figures by name, as "
            'in {"accuracy": 0.97}'
        )

    return guarded


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _describe(value: Any) -> str:
    """Return a text for a message: None, a number or a string itself; else the value's type."""
    if value is None or isinstance(value, (int, float, str)):
        return repr(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    size = f" of {len(value)}" if isinstance(value, (tuple, list, dict)) else ""
    return f"a {type(value).__name__}{size}"
