"""Time from the start of a process until a whole model is loaded on a device, as a single stage.

    PYTHONPATH=tests python -m benchmarks.loaded DEVICE MODEL

The command prints a line of JSON with the end of each phase. `benchmarks.startup` runs the command
with cold and with warm caches. With HETPIPE_CLOCK=process the times are CPU seconds of this
process, for a busy machine; they omit compilations in other processes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from hetpipe import environment

BEGIN = "HETPIPE_BEGIN_S"  # environment variable with the start time of the process
LOADED = "programs and weights"
"""The last phase before the first pass."""
SAMPLES = 4


class Clock:
    """Records the end of each phase, in seconds since the start of the process."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._phase = "import"

    def __call__(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Begin a phase, and record the end of the previous one; `done` and `total` are ignored."""
        name = phase.partition(" of ")[0]
        if name != self._phase:
            self.phases[self._phase] = _since_begin_s()
            self._phase = name


def _since_begin_s() -> float:
    if environment.clock() is time.process_time:
        return time.process_time()
    return time.time() - environment.seconds(BEGIN, time.time())


def load(device_id: str, model: str) -> dict[str, Any]:
    """Load a model of the zoo, train a step of `SAMPLES` samples, and return the phases.

    The result also has the number of exports.
    """
    clock = Clock()
    clock("torch")
    import torch  # noqa: F401

    clock("hetpipe")
    from benchmarks.steprates import Trained
    from hetpipe.sdk.host.registry import open_device
    from hetpipe.zoo.load import load_workload

    clock("model")
    workload = load_workload(model)
    batch = next(workload.batches(SAMPLES, 0))
    clock("device")
    device = open_device(device_id)
    clock("signature")
    trained = Trained(workload, batch)
    clock("graphs")
    trained.trace(device)
    clock(LOADED)
    trained.load(device)
    clock("first step")
    trained.step()
    clock("end")
    return {"phases": clock.phases, "counts": {"exports": trained.captured.exports}}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault(BEGIN, repr(time.time()))
    print(json.dumps(load(*sys.argv[1:])))
