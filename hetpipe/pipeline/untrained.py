"""The entries of a model's `state_dict` that no stage holds: they stay as they are."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured

EXTRA = "_extra_state"
"""The last part of the name of a module's `get_extra_state`."""


class ExtraStateWarning(UserWarning):
    """A checkpoint does not hold what a module's `get_extra_state` returns."""


def untrained(state: Mapping[str, Any], captured: Captured) -> dict[str, Any]:
    """Return copies of the buffers that nobody reads, and of the extra state of modules."""
    trained = {*captured.parameters, *captured.buffers, *captured.aliases}
    return {name: copy.deepcopy(state[name]) for name in state if name not in trained}


def warn_of_extra_state(untrained: Mapping[str, Any]) -> None:
    """Warn of the modules whose extra state a checkpoint does not hold."""
    names = [name for name in untrained if name.rpartition(".")[2] == EXTRA]
    if names:
        warnings.warn(
            f"the checkpoint does not hold {', '.join(names)}, from get_extra_state: give "
            "Pipeline.load a model that has it, or keep it in a buffer",
            ExtraStateWarning,
            stacklevel=4,
        )
