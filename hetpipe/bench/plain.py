"""Plain torch in a process of its own: the rate that a pipeline has to be worth it against.

`python -m hetpipe.bench.plain MODEL ROWS SEED CORES` reads lines {"microbatches", "steps"} and
answers each with {"step_s"}, after untimed steps. Threads and cores are set before torch starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import islice

from hetpipe.errors import HetpipeError

LIMIT_S = 10.0  # to leave after its input has ended
WARM_UP = 3  # steps: a row that paused while others ran finds its caches and pages cold


class PlainTorch:
    """Plain torch with so many threads, pinned to as many cores, until `close`."""

    def __init__(self, model: str, rows: int, seed: int, cores: Sequence[int]) -> None:
        self.threads = len(cores)
        settings = {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        command = [sys.executable, "-m", __name__, model, str(rows), str(seed)]
        command.append(",".join(map(str, cores)))
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **settings},
        )

    def step_s(self, microbatches: int, steps: int) -> float:
        """Mean seconds of `steps` steps. Raises `HetpipeError` if the process has died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            request = {"microbatches": microbatches, "steps": steps}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return float(json.loads(self._process.stdout.readline())["step_s"])
        except (OSError, ValueError) as error:
            raise HetpipeError("the process that runs plain torch has died, see above") from error

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(LIMIT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main(model: str, rows: str, seed: str, cores: str) -> None:
    """Serve requests from standard input until it ends."""
    numbers = [int(core) for core in cores.split(",")]
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, numbers)

    import torch

    from hetpipe.bench.eager import Eager, micro_sizes
    from hetpipe.bench.zoo import load_workload, optimizer_of

    torch.set_num_threads(len(numbers))
    workload = load_workload(model)
    eager = Eager(workload.model, workload.loss_fn, optimizer_of(workload))
    batches = workload.batches(int(rows), int(seed))
    for line in sys.stdin:
        request = json.loads(line)
        sizes = micro_sizes(int(rows), request["microbatches"])
        for x, y in islice(batches, WARM_UP):
            eager.step(x, y, sizes)
        fed = list(islice(batches, request["steps"]))
        begin_s = time.perf_counter()
        for x, y in fed:
            eager.step(x, y, sizes)
        step_s = (time.perf_counter() - begin_s) / request["steps"]
        print(json.dumps({"step_s": step_s}), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
