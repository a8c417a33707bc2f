"""Makes the user's operators known to the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetpipe.sdk.host.references import operator_origins

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.crew.crew import Crew


def share_operators(captured: Captured, crew: Crew) -> None:
    """Let all workers import the modules that define the model's custom operators.

    Raises `BackendError` for an operator whose module is unknown.
    """
    layers = captured.layer_graph(captured.samples).layers
    operators = list(dict.fromkeys(name for layer in layers for name in layer.operators))
    if origins := operator_origins(operators):
        function = "hetpipe.sdk.host.references:import_operators"
        crew.call(list(crew.infos), function, operators, origins)
