"""The layers that a device cannot run, asked inside its worker; nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.program import StageGraphs
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import of_one_replica, require_support


def refused_by(device: Device, stages: Sequence[StageGraphs]) -> dict[int, str]:
    """The reasons, by number, why the device cannot run the passes or the update of a stage."""
    reasons: dict[int, str] = {}
    for number, stage in enumerate(stages):
        programs = [program for own in stage.passes.values() for program in own.programs]
        programs += [] if stage.update is None else [stage.update]
        try:
            for program in programs:
                require_support(device, of_one_replica(program.graph))
        except UnsupportedOperatorError as error:
            reasons[number] = str(error)
    return reasons
