"""Plain torch in a separate process. A pipeline has to beat its rate.

`python -m hetpipe.bench.plain MODEL ROWS SEED THREADS` is a child that trains with mini-batches of
ROWS samples. It answers each request {"microbatches", "steps", "warm_up"} with {"step_s"}, the mean
time of `steps` steps after `warm_up` untimed steps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import islice

from hetpipe.child import Child, Parent
from hetpipe.crew.launcher import THREADS


class PlainTorch:
    """A process that trains with plain torch on given cores, with one thread per core."""

    def __init__(self, model: str, rows: int, seed: int, cores: Sequence[int]) -> None:
        self.threads = len(cores)
        environment = dict.fromkeys(THREADS, str(len(cores)))
        arguments = (model, rows, seed, len(cores))
        self._child = Child(__name__, *arguments, environment=environment, cores=cores)

    def step_s(self, microbatches: int, steps: int, warm_up: int) -> float:
        """Return the mean seconds of `steps` steps, after `warm_up` untimed steps.

        Raises `ChildEnded` if the process has ended.
        """
        self._child.send({"microbatches": microbatches, "steps": steps, "warm_up": warm_up})
        return float(self._child.receive()["step_s"])

    def close(self) -> None:
        """End the process."""
        self._child.close()


def main(model: str, rows: str, seed: str, threads: str) -> None:
    """Answer the parent's requests until the parent ends."""
    parent = Parent()
    import torch

    from hetpipe.pipeline.batches import micro_sizes
    from hetpipe.train.eager import Eager
    from hetpipe.zoo.load import load_workload, optimizer_of

    torch.set_num_threads(int(threads))
    workload = load_workload(model)
    eager = Eager(workload.model, workload.loss_fn, optimizer_of(workload))
    batches = workload.batches(int(rows), int(seed))
    for request in parent.requests():
        sizes = micro_sizes(int(rows), request["microbatches"])
        for x, y in islice(batches, request["warm_up"]):
            eager.step(x, y, sizes)
        fed = list(islice(batches, request["steps"]))
        begin_s = time.perf_counter()
        for x, y in fed:
            eager.step(x, y, sizes)
        parent.send({"step_s": (time.perf_counter() - begin_s) / request["steps"]})


if __name__ == "__main__":
    main(*sys.argv[1:])
