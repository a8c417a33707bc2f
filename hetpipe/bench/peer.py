"""The peer: torch's own pipeline in separate processes, one per core, for comparison.

The peer is `torch.distributed.pipelining` with the schedule 1F1B over gloo. The model is cut at the
blocks that the workload names, with equal numbers of blocks. A parameter that the model uses twice
(a tied embedding) becomes two parameters, because torch does not keep copies on two stages equal.
So the peer has less work, and trains a different model from the second step on.

`python -m hetpipe.bench.peer MODEL ROWS SEED PORT RANK WORLD` is a child with the stage RANK of
WORLD stages. It answers each request {"microbatches", "steps", "warm_up"} with {"step_s", "loss"}:
the mean time of `steps` steps after `warm_up` untimed steps, and the loss of the last step. Only
the last rank knows the loss; the other ranks send null.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any

from hetpipe.child import Child, Parent, ask
from hetpipe.crew.launcher import THREADS

if TYPE_CHECKING:
    import torch

    from hetpipe.cluster.cluster import Cluster
    from hetpipe.zoo.workload import Workload

START_LIMIT_S = 120.0  # time limit until all processes have joined
ENVIRONMENT = {**dict.fromkeys(THREADS, "1"), "GLOO_SOCKET_IFNAME": "lo"}


class PeerTorch:
    """A pipeline of torch. Each core has a process with one stage; `close` ends the processes."""

    def __init__(self, model: str, rows: int, seed: int, cores: Sequence[int]) -> None:
        from hetpipe.wire.gloo import host

        self._store, (_, port) = host()
        self.loss = float("nan")
        common = (model, rows, seed, port)
        self._children = [
            Child(__name__, *common, rank, len(cores), environment=ENVIRONMENT, cores=[core])
            for rank, core in enumerate(cores)
        ]

    def step_s(self, microbatches: int, steps: int, warm_up: int) -> float:
        """Return the mean seconds of `steps` steps on the slowest process.

        `warm_up` untimed steps come first. Set `loss` to the last step's loss. Raises `ChildEnded`
        as soon as a process has ended.
        """
        request = {"microbatches": microbatches, "steps": steps, "warm_up": warm_up}
        answers = ask(self._children, request)
        self.loss = float(answers[-1]["loss"])
        return max(float(answered["step_s"]) for answered in answers)

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()


def cores_of(cluster: Cluster) -> list[int]:
    """Return the distinct cores of all members, sorted."""
    return sorted({core for member in cluster.members for core in member.cores})


def equal_counts(rows: int, stages: int, counts: Sequence[int]) -> list[int]:
    """Return the counts that torch accepts: micro-batches of equal size, at least one per stage."""
    return [count for count in counts if count >= stages and rows % count == 0]


def refusal(workload: Workload, cluster: Cluster, rows: int, counts: Sequence[int]) -> str:
    """Return why torch's own pipeline cannot run here, or "" if it can."""
    from torch import distributed

    stages, blocks = len(cores_of(cluster)), len(workload.blocks)
    if not blocks:
        return f"{workload.name} does not name blocks at which torch may cut it (Workload.blocks)"
    if cluster.links or any(member.speed != 1.0 for member in cluster.members):
        return "it emulates no speeds and no links"
    if cluster.connections is not None:
        return "it would need gloo between hosts"
    if any(not member.cores for member in cluster.members):
        return "it runs only on processors"
    if not 2 <= stages <= blocks:
        return f"it needs {stages} stages, one per core; {workload.name} makes 2 to {blocks} stages"
    if not equal_counts(rows, stages, counts):
        listed = ", ".join(map(str, counts))
        return f"{rows} samples do not make {listed} equal micro-batches, one or more per stage"
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "this torch was built without gloo"
    return ""


def even_cuts(blocks: Sequence[str], stages: int) -> list[str]:
    """Return the first blocks of the stages 1, 2, ...

    Stage 0 also has the modules before the blocks.
    """
    return [blocks[stage * len(blocks) // stages] for stage in range(1, stages)]


def untie(model: torch.nn.Module) -> None:
    """Replace shared parameters by copies, so that no two modules share a parameter."""
    from torch import nn

    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))


def stepper(
    workload: Workload, rank: int, world: int, rows: int, microbatches: int
) -> Callable[[Any, Any], float | None]:
    """Return a function `step(x, y)` that trains this rank's stage of a copy of the model.

    On the last rank the function returns the mean loss, on other ranks None. The model must be
    untied, and `microbatches` must divide `rows`.
    """
    import copy

    import torch
    from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

    from hetpipe.train.eager import rows_of, torch_optimizer
    from hetpipe.zoo.load import optimizer_of

    x, _ = next(workload.batches(rows, 0))
    cuts = dict.fromkeys(even_cuts(workload.blocks, world), SplitPoint.BEGINNING)
    example = (rows_of(x, 0, rows // microbatches),)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch itself calls functions that are deprecated
        cut = pipeline(copy.deepcopy(workload.model), example, split_spec=cuts)
    stage = cut.build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=workload.loss_fn)
    optimizer = torch_optimizer(optimizer_of(workload), dict(stage.submod.named_parameters()))

    def step(x: Any, y: Any) -> float | None:
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([x] if rank == 0 else []),
            **({"target": y, "losses": losses} if rank == world - 1 else {}),
            return_outputs=False,
        )
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if losses else None

    return step


def main(model: str, rows_text: str, seed: str, port: str, rank_text: str, world_text: str) -> None:
    """Answer the parent's requests until the parent ends."""
    parent = Parent()
    import torch

    from hetpipe.wire.gloo import join
    from hetpipe.zoo.load import load_workload

    torch.set_num_threads(1)
    rows, rank, world = int(rows_text), int(rank_text), int(world_text)
    join(rank, world, ("127.0.0.1", int(port)), START_LIMIT_S)
    workload = load_workload(model)
    untie(workload.model)
    batches = workload.batches(rows, int(seed))

    @lru_cache
    def step_of(microbatches: int) -> Callable[[Any, Any], float | None]:
        return stepper(workload, rank, world, rows, microbatches)

    for request in parent.requests():
        step = step_of(request["microbatches"])
        for x, y in islice(batches, request["warm_up"]):
            step(x, y)
        fed = list(islice(batches, request["steps"]))
        torch.distributed.barrier()
        begin_s = time.perf_counter()
        for x, y in fed:
            loss = step(x, y)
        parent.send({"step_s": (time.perf_counter() - begin_s) / len(fed), "loss": loss})


if __name__ == "__main__":
    main(*sys.argv[1:])
