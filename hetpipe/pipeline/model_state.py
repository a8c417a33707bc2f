"""The `state_dict` of a model in training, including the entries that no stage holds."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hetpipe.capture.export.named_tensors import LOSS_PREFIX
from hetpipe.capture.program import BUFFER, PARAM
from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from torch import nn

    from hetpipe.capture.captured import Captured
    from hetpipe.pipeline.training import Training
    from hetpipe.wire.messages import Array

EXTRA = "_extra_state"
"""The last part of the key under which `state_dict` stores a module's extra state."""


class ExtraStateWarning(UserWarning):
    """A checkpoint does not hold the result of a module's `get_extra_state`."""


class ModelState:
    """A model's `state_dict`, with the present values of trained entries.

    It keeps copies of the remaining entries: buffers that no operator reads, and modules' extra
    state. In `captured`, the names of all entries begin with `prefix`.
    """

    def __init__(self, state: Mapping[str, Any], captured: Captured, prefix: str) -> None:
        self._captured, self._prefix = captured, prefix
        self._names = list(state)
        trained = {*captured.parameters, *captured.buffers, *captured.aliases}
        self._others = {
            name: copy.deepcopy(state[name]) for name in state if prefix + name not in trained
        }

    @property
    def sources(self) -> dict[str, str]:
        """The names of trained entries, each with its tensor's name in a checkpoint."""
        aliases, names = self._captured.aliases, [n for n in self._names if n not in self._others]
        return {name: aliases.get(self._prefix + name, self._prefix + name) for name in names}

    def read(self, training: Training) -> dict[str, Any]:
        """Return the present entries, in the model's order. The training must be at rest."""
        captured = self._captured
        names: dict[str, list[str]] = {}  # by their name in `captured`
        for name in self._names:
            source = self._prefix + name
            names.setdefault(captured.aliases.get(source, source), []).append(name)
        trained: dict[str, Any] = {}
        for role in (PARAM, BUFFER):
            present = training.tensors(role)
            sources = [source for source in present if source in names]
            for source, value in zip(sources, present.each(sources), strict=True):
                trained.update(as_tensors(dict.fromkeys(names.pop(source), value)))
        for source, value in (captured.parameters | captured.buffers).items():
            trained.update(as_tensors(dict.fromkeys(names.get(source, ()), value)))
        captured.watch.add_returned(trained, self._prefix)
        state = self._others | trained
        return {name: state[name] for name in self._names}

    def warn_of_extra(self) -> None:
        """Warn of the modules whose extra state a checkpoint does not hold."""
        names = [name for name in self._others if name.rpartition(".")[2] == EXTRA]
        if names:
            warnings.warn(
                f"the checkpoint does not hold {', '.join(names)}, from get_extra_state: give "
                "Pipeline.load a model with this state, or keep the state in buffers",
                ExtraStateWarning,
                stacklevel=4,
            )


def states_of(
    model: nn.Module, loss_fn: Callable[..., Any], captured: Captured
) -> tuple[ModelState, ModelState]:
    """Return the states of the model and of the loss; a loss that is a function has none."""
    of_loss: Mapping[str, Any] = getattr(loss_fn, "state_dict", dict)()
    return ModelState(model.state_dict(), captured, ""), ModelState(of_loss, captured, LOSS_PREFIX)


def load_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `state_dict` into a model. Raises `HetpipeError` if names or shapes differ."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = str(error).splitlines()
        raise HetpipeError(
            f"{type(model).__name__} does not take the trained state: "
            f"{' '.join(line.strip() for line in lines[1:4])}"
        ) from error


def as_tensors(arrays: Mapping[str, Array]) -> dict[str, Any]:
    """Return host arrays as torch tensors."""
    import torch

    return {name: torch.from_numpy(np.array(array)) for name, array in arrays.items()}
