"""Captures that tests share: one per model, with its stages once per list of cuts."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.precision import Precision


class Shared(Captured):
    """A capture that keeps the graphs of its stages; training changes no graph."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._kept: dict[Any, Any] = {}

    def stage_graphs(self, *args: Any, **options: Any) -> Any:
        return self._keep(super().stage_graphs, args, options)

    def evaluation_graphs(self, *args: Any, **options: Any) -> Any:
        return self._keep(super().evaluation_graphs, args, options)

    def _keep(self, trace: Callable[..., Any], args: Any, options: dict[str, Any]) -> Any:
        key = trace.__name__, _hashable(args), _hashable(tuple(options.items()))
        if key not in self._kept:
            self._kept[key] = trace(*args, **options)
        return list(self._kept[key])


_captures: dict[str, Shared] = {}


def shared(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    example: tuple[Any, Any],
    precision: Precision = Precision(),  # noqa: B008 - frozen
    sync_batch_norm: bool = False,
) -> Shared:
    """Return the capture of an equal model, loss and example; make it at the first call.

    Classes and functions are equal if their names are. Local ones cannot be pickled, so a model
    with one is captured at every call.
    """
    args = model, loss_fn, example, precision, sync_batch_norm
    file = io.BytesIO()
    try:
        _ByValue(file).dump(args)
    except (AttributeError, TypeError, pickle.PicklingError):
        return Shared(*args)
    key = hashlib.sha256(file.getvalue()).hexdigest()
    if key not in _captures:
        _captures[key] = Shared(copy.deepcopy(model), *args[1:])
    return _captures[key]


class _ByValue(pickle.Pickler):
    """Pickle equal tensors to equal bytes: torch's pickles contain addresses."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        array = value.detach().numpy()
        about = type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad
        return tuple, ((*about, array.tobytes()),)


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):  # decompositions: torch makes some functions in each call
        names = ((op, getattr(function, "__qualname__", "")) for op, function in value.items())
        return frozenset(names)
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
