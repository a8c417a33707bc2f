"""Plain torch in a separate process: the rate that a pipeline has to beat.

`python -m hetpipe.bench.plain MODEL ROWS SEED CORES` answers each request {"microbatches", "steps",
"warm_up"} with {"step_s"}, the mean time of `steps` steps after `warm_up` untimed steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import islice

from hetpipe.bench.child import Child, answer, ask, pin, requests


class PlainTorch:
    """A process with plain torch, pinned to cores, with one thread per core, until `close`."""

    def __init__(self, model: str, rows: int, seed: int, cores: Sequence[int]) -> None:
        self.threads = len(cores)
        self._child = Child(__name__, (model, rows, seed), cores)

    def step_s(self, microbatches: int, steps: int, warm_up: int) -> float:
        """Return the mean seconds of `steps` steps, after `warm_up` untimed steps.

        Raises `HetpipeError` if the process has died.
        """
        request = {"microbatches": microbatches, "steps": steps, "warm_up": warm_up}
        (answered,) = ask([self._child], request)
        return float(answered["step_s"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main(model: str, rows: str, seed: str, cores: str) -> None:
    """Serve requests from standard input until it ends."""
    threads = pin(cores)

    import torch

    from hetpipe.bench.eager import Eager, micro_sizes
    from hetpipe.zoo.load import load_workload, optimizer_of

    torch.set_num_threads(threads)
    workload = load_workload(model)
    eager = Eager(workload.model, workload.loss_fn, optimizer_of(workload))
    batches = workload.batches(int(rows), int(seed))
    for request in requests():
        sizes = micro_sizes(int(rows), request["microbatches"])
        for x, y in islice(batches, request["warm_up"]):
            eager.step(x, y, sizes)
        fed = list(islice(batches, request["steps"]))
        begin_s = time.perf_counter()
        for x, y in fed:
            eager.step(x, y, sizes)
        answer(step_s=(time.perf_counter() - begin_s) / request["steps"])


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
