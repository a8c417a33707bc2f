"""Runs the small programs of a measurement once, so that what a runtime compiles for them is there.

The workers do it while the controller traces the network (`hetpipe.profile.rounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.capture.program import StageGraphs
from hetpipe.profile import probe
from hetpipe.profile.patterns import Network
from hetpipe.profile.profiler import Session, Taken
from hetpipe.sdk.backend import Device


def warm_up(device: Device, stages: Sequence[StageGraphs]) -> None:
    """Compile and run these stages, for one sample, and the probes."""
    for stage in stages:
        session = Session(device, Network.of([stage]), 1.0)
        session.walk(1, session.able, Taken())
    if probe.prepare(device, 1.0, None) is not None:
        probe.release(device)
