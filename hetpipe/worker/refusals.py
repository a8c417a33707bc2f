"""Finds the layers that a device cannot run, inside its worker; nothing is compiled."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.program import StageGraphs
from hetpipe.errors import UnsupportedOperatorError
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import of_one_replica, require_support
from hetpipe.worker.ahead import programs_of


def refused_by(device: Device, stages: Sequence[StageGraphs]) -> dict[int, str]:
    """Return, by number, the reasons why the device cannot run the programs of a stage."""
    reasons: dict[int, str] = {}
    for number, stage in enumerate(stages):
        try:
            for program in programs_of(stage):
                require_support(device, of_one_replica(program.graph))
        except UnsupportedOperatorError as error:
            reasons[number] = str(error)
    return reasons
