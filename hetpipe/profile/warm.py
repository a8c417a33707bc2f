"""Runs the small programs of a measurement once, so that the devices' runtimes have compiled them.

The workers run these programs while the controller captures the model.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hetpipe.capture.program import StageGraphs
from hetpipe.crew.workers import Workers
from hetpipe.profile import probing
from hetpipe.profile.links import small_stages
from hetpipe.profile.patterns import Network
from hetpipe.profile.profiler import Session, Times
from hetpipe.sdk.backend import Device
from hetpipe.worker.divided import compile_ahead
from hetpipe.worker.emulation import OWN_SPEED

_own = threading.local()
"""Whether a worker is warm. It is thread-local: all calls of a worker come on one thread, and
workers may share a process."""


def begin(crew: Workers) -> None:
    """Start the warm-up of all workers, without waiting for processes. A worker warms up once."""
    stages = small_stages()
    arguments = {member.id: (stages,) for member in crew.cluster.members}
    crew.begin_each("hetpipe.profile.warm:warm_up", arguments)


def warm_up(device: Device, stages: Sequence[StageGraphs]) -> None:
    """Compile and run the stages, for one sample, and the programs of the probes."""
    if getattr(_own, "warm", False):
        return
    compile_ahead(device, stages)
    for stage in stages:
        session = Session(device, Network.of([stage]))
        session.walk(1, session.able, Times())
    if probing.prepare(device, OWN_SPEED, None) is not None:
        probing.release(device)
    _own.warm = True
