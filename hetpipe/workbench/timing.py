"""Child process that measures a kernel with several values of its macros, in turns.

    python -m hetpipe.workbench.timing REQUEST

REQUEST is JSON: the device, the kernel, the numbers of the cases, the rounds, and the seconds that
each case takes in a round. The child sends a list with the seconds of a launch for each round.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetpipe.child import Parent
from hetpipe.errors import BackendError
from hetpipe.records import read_text
from hetpipe.sdk.formats.kernelspec import read_spec
from hetpipe.sdk.host.references import load_reference
from hetpipe.sdk.host.registry import get_backend
from hetpipe.workbench.case import Run, call_of

MOST_LAUNCHES = 1000
"""Most launches of a case in a round: a launch may take much longer than the kernel itself."""


def measure(request: dict[str, Any]) -> list[list[float]]:
    """Return the seconds of a launch, for each round and case; the cases take turns."""
    load_reference(request["reference"])
    device_id, path = request["device"], Path(request["source"])
    runner = get_backend(device_id.partition(":")[0]).kernel_runner()
    assert runner is not None, "the parent has asked"
    spec = replace(read_spec(Path(request["spec"])), define=request["define"])
    source = read_text(path, BackendError)
    launches, counts = [], []
    for number in request["numbers"]:
        call = call_of(spec, number, path, source, request["function"], request["seed"], Run.LISTED)
        launch = runner.timed(device_id, call)
        launch(1)
        launches.append(launch)
        most = request["seconds"] / max(launch(1), 1e-9)
        counts.append(max(1, min(round(most), MOST_LAUNCHES)))
    return [
        [launch(count) for launch, count in zip(launches, counts, strict=True)]
        for _ in range(request["rounds"])
    ]


if __name__ == "__main__":
    _parent = Parent()
    _parent.send({"result": measure(json.loads(sys.argv[1]))})
