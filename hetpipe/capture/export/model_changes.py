"""Detects changes of a model after it was captured."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from hetpipe.capture.export.named_tensors import LOSS_PREFIX, roots, tensor_bytes
from hetpipe.errors import HetpipeError

_PLAIN = (int, float, bool, str, type(None), torch.Tensor)
CALLS = ("step", "run", "evaluate", "gradients")
"""The calls of a pipeline that compute with the model."""
_SAMPLE = 1024
"""A parameter's checksum covers all its elements, or at least this many."""


class ModelChangedWarning(UserWarning):
    """A model's values changed after its capture; the pipeline trains its own copies."""


class _ModuleRecord(NamedTuple):
    """The state of a module at capture."""

    name: str
    module: nn.Module
    children: tuple[nn.Module | None, ...]
    parameters: tuple[nn.Parameter | None, ...]
    learns: tuple[bool, ...]
    attributes: tuple[tuple[str, Any], ...]


class Watch:
    """Compares a model and its loss with their state at capture, apart from modes."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        ignored: Collection[tuple[str, str]] | None,
    ) -> None:
        """Record the model without the attributes (module, name) in `ignored`; None ignores all."""
        self._seen = [
            _record_module(prefix, name, module, ignored)
            for prefix, root in roots(model, loss_fn)
            for name, module in root.named_modules()
        ]
        self._parameters: dict[str, nn.Parameter] = {}
        for prefix, root in roots(model, loss_fn):
            self._parameters |= {prefix + name: p for name, p in root.named_parameters()}
        self._versions = [p._version for p in self._parameters.values()]
        self._captured = self._samples()
        self._returned: dict[str, int] = {}

    def check(self, call: str) -> None:
        """Raise `HetpipeError` if layers, parameters or attributes of the model have changed.

        Warns if the user has changed values of parameters, because training has its own copies.
        """
        if call not in CALLS:
            return
        if (change := self.change()) is not None:
            raise HetpipeError(
                f"{call}(): the model was changed after its capture: {change}."
                " This pipeline would continue with the captured model: undo "
                "the change, or read the values with state_dict() and make "
                "another pipeline"
            )
        if (name := self.changed_values()) is not None:
            warnings.warn(
                f"the model's parameter {name} has new values, which the "
                "pipeline does not see, because it trains its own copies; "
                "load values before you make the pipeline",
                ModelChangedWarning,
                stacklevel=6,
            )

    def change(self) -> str | None:
        """Return the first change of a layer, a parameter or an attribute, or None."""
        for seen in self._seen:
            module = seen.module
            if not (
                _same(module._modules, seen.children)
                and _same(module._parameters, seen.parameters)
                and all(map(_learns, seen.parameters, seen.learns))
                and all(_is_still(module, name, value) for name, value in seen.attributes)
            ):
                return next(_changes(seen))
        return None

    def changed_values(self) -> str | None:
        """Name a parameter whose values were neither captured nor returned, once per change."""
        versions = [p._version for p in self._parameters.values()]
        if versions == self._versions:
            return None
        self._versions = versions
        for name, sample in self._samples().items():
            if sample not in (self._captured[name], self._returned.get(name)):
                return name
        return None

    def add_returned(self, values: Mapping[str, torch.Tensor], prefix: str = "") -> None:
        """Note values that the user has received and may load into the model."""
        named = {prefix + name: value for name, value in values.items()}
        known = self._parameters.keys() & named.keys()
        self._returned |= {name: _sample(named[name]) for name in known}

    def _samples(self) -> dict[str, int]:
        return {name: _sample(p) for name, p in self._parameters.items()}


def _record_module(
    prefix: str, name: str, module: nn.Module, ignored: Collection[tuple[str, str]] | None
) -> _ModuleRecord:
    root = "loss_fn" if prefix else "model"
    key = f"{root}.{name}".rstrip(".")
    attributes = () if ignored is None else tuple(
        (attribute, value)
        for attribute, value in vars(module).items()
        if isinstance(value, _PLAIN)
        and attribute != "training"
        and not attribute.startswith("_")
        and (key, attribute) not in ignored
    )  # fmt: skip
    parameters = tuple(module._parameters.values())
    return _ModuleRecord(
        prefix + name,
        module,
        tuple(module._modules.values()),
        parameters,
        tuple(p is not None and p.requires_grad for p in parameters),
        attributes,
    )


def _same(present: Mapping[str, Any], seen: tuple[Any, ...]) -> bool:
    return len(present) == len(seen) and all(map(is_, present.values(), seen))


def _learns(parameter: nn.Parameter | None, learned: bool) -> bool:
    """Return whether a parameter requires a gradient as before."""
    return parameter is None or parameter.requires_grad == learned


def _is_still(module: nn.Module, name: str, value: Any) -> bool:
    present = module.__dict__.get(name, _record_module)
    if present is value:
        return True
    return type(present) is type(value) and not isinstance(value, torch.Tensor) and present == value


def _changes(seen: _ModuleRecord) -> Iterator[str]:
    module, called = seen.module, seen.name.rstrip(".") or "the model"
    if seen.name == LOSS_PREFIX:
        called = "the loss"
    if not _same(module._modules, seen.children):
        yield f"{called} ({type(module).__name__}) has other layers: {', '.join(module._modules)}"
    if not _same(module._parameters, seen.parameters):
        yield f"{called} ({type(module).__name__}) has other parameters"
    for (name, parameter), learned in zip(module._parameters.items(), seen.learns, strict=True):
        if not _learns(parameter, learned):
            yield f"requires_grad of {name} of {called} is {not learned} and was {learned}"
    for name, value in seen.attributes:
        if not _is_still(module, name, value):
            if isinstance(value, torch.Tensor):
                yield f"{name} of {called} is another tensor"
            present = module.__dict__.get(name)
            yield f"{name} of {called} ({type(module).__name__}) is {present!r} and was {value!r}"


def _sample(tensor: torch.Tensor) -> int:
    """Return a checksum of some elements: a load of new values changes nearly all elements."""
    flat = tensor.detach().reshape(-1)
    return zlib.crc32(tensor_bytes(flat[:: max(1, flat.numel() // _SAMPLE)]))
