"""The cost of an action that computes nothing: `python -m hetpipe.papers.overhead`."""

from __future__ import annotations

import statistics
import sys

import numpy as np
import torch
from torch import fx

from hetpipe.capture.program import (
    CUT,
    GRAD,
    INPUT,
    LOSS,
    PARAM,
    TANGENT,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)  # fmt: skip
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member, available_cores
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.schedule.action import Schedule
from hetpipe.schedule.generators import generate
from hetpipe.sdk.graph import canonical
from hetpipe.wire.messages import Keep

ROUNDS = 7
TRANSPORTS = ("local", "shared-memory", "distributed")


def measure_empty_action(
    transport: str, workers: int = 2, microbatches: int = 64, device: str = "pytorch:cpu:0"
) -> float:
    """Return the seconds per action of steps whose graphs only return their inputs.

    Each worker is pinned to a core. The result is the median time of some 1F1B steps, from the
    first start to the last end in a step, divided by the number of actions of the busiest worker.
    """
    cores = available_cores()
    members = tuple(Member(f"worker {n}", device, (cores[n % len(cores)],)) for n in range(workers))
    schedule = generate("1f1b", workers, microbatches)
    request = empty_request(schedule, microbatches)
    with Crew.start(Cluster(members, transport=transport)) as crew:
        load_empty(crew, Keep())
        times_s = [crew.step(request).timeline.step_s for _ in range(ROUNDS)]
    return statistics.median(times_s[1:]) / max(len(actions) for actions in schedule)


def load_empty(crew: Crew, keep: Keep, width: int = 1) -> None:
    """Load an `empty_stage` on each worker."""
    members = [member.id for member in crew.cluster.members]
    weights = {f"w{n}": np.zeros((), np.float32) for n in range(len(members))}
    stages = [empty_stage(n, len(members), width) for n in range(len(members))]
    crew.load(stages, members, weights, keep=keep)


def empty_request(schedule: Schedule, microbatches: int, width: int = 1) -> StepRequest:
    """Return the request of a step of empty stages."""
    feeds = [{"x": np.zeros((1, width), np.float32)}] * microbatches
    ones = (1,) * microbatches
    return StepRequest(schedule, ones, feeds, (1.0,) * microbatches, {"lr": 0.0}, 1, grad_scale=1.0)


def empty_stage(n: int, stages: int, width: int = 1) -> StageGraphs:
    """Return a stage that passes on its inputs and has one weight; a cut has `width` numbers."""
    first, last = n == 0, n == stages - 1
    enter = _tensor(INPUT, "x", width) if first else _tensor(CUT, f"t{n - 1}", width)
    scalar = Slot(LOSS, "loss", (), "float32")
    weight, grad = Slot(PARAM, f"w{n}", (), "float32"), Slot(GRAD, f"w{n}", (), "float32")
    leave = scalar if last else _tensor(CUT, f"t{n}", width)
    forward = _select([enter, weight], [leave])
    arrives = Slot(TANGENT, leave.name, leave.shape, "float32")
    back = [] if first else [_tensor(TANGENT, enter.name, width)]
    backward = _select([arrives, grad, enter], [grad, *back])
    return StageGraphs(n, {1: PassPrograms(1, forward, backward)})


def _tensor(role: str, name: str, width: int) -> Slot:
    return Slot(role, name, (1, width), "float32")


def _select(inputs: list[Slot], outputs: list[Slot]) -> Program:
    """Return a program without operators: an output is the input of equal key, or else shape."""
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for slot in inputs:
        nodes.append(graph.placeholder(f"{slot.role}{len(nodes)}"))
        nodes[-1].meta["val"] = torch.empty(slot.shape, device="meta")
    shapes = [slot.shape for slot in inputs]
    output = graph.output(tuple(nodes[_match(shapes, inputs, slot)] for slot in outputs))
    output.meta["val"] = None
    return Program(canonical(graph), tuple(inputs), tuple(outputs))


def _match(shapes: list[tuple[int, ...]], inputs: list[Slot], slot: Slot) -> int:
    keys = [slot.key for slot in inputs]
    return keys.index(slot.key) if slot.key in keys else shapes.index(slot.shape)


def main(device: str = "pytorch:cpu:0") -> None:
    for transport in TRANSPORTS:
        cost_s = measure_empty_action(transport, device=device)
        print(f"{device:16} {transport:14} {cost_s * 1e6:7.1f} us per action and worker, measured")


if __name__ == "__main__":
    main(*sys.argv[1:2])
