"""Refuses to continue with a model that the user has changed after its capture."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from hetpipe.errors import HetpipeError

if TYPE_CHECKING:
    from hetpipe.capture.export.model_changes import Watch

CALLS = ("step", "run", "evaluate", "gradients")
"""The calls that compute with the model."""


def check_unchanged(watch: Watch, call: str) -> None:
    """Raise `HetpipeError` if layers, parameters or attributes of the model have changed.

    Warns if the user has changed values of parameters, because training has its own copies.
    """
    if call not in CALLS:
        return
    if (change := watch.change()) is not None:
        raise HetpipeError(
            f"{call}(): the model was changed after it was captured: {change}. This pipeline "
            "would go on with the model as it was: undo the change, or take the values with "
            "state_dict() and make another pipeline"
        )
    if (name := watch.changed_values()) is not None:
        from hetpipe.capture.export.model_changes import ModelChangedWarning

        warnings.warn(
            f"the model's parameter {name} has new values, neither the captured ones nor the "
            "results of state_dict(): the pipeline trains its own copies, and does not see them; "
            "load values "
            "before the pipeline is made",
            ModelChangedWarning,
            stacklevel=6,
        )
