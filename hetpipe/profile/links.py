"""Measures links, the controller's time per step, and the engine's part of an action.

The engine's part is an action's time beyond its program's time on the device. After a worker has
waited for its device, its core's caches hold little of its data. So the engine's part is measured
with a matrix product of a probe's size, not with the smallest program.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, permutations
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.capture.program import CUT, GRAD, INPUT, LOSS, PassPrograms, Program, Slot, StageGraphs
from hetpipe.cost.table import LinkCost
from hetpipe.crew.crew import Crew
from hetpipe.crew.groups import may_group
from hetpipe.crew.request import StepRequest
from hetpipe.profile.clock import Samples
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk.graph import canonical

NBYTES = (4 << 10, 256 << 10, 4 << 20)
ROUNDS = 12
WARM_UP = 2  # number of first rounds, and of first actions, that do not count

Links = dict[tuple[str, str], LinkCost]
"""The costs of links by (source, target)."""


def measure_links(crew: Crew) -> tuple[Links, float]:
    """Return the costs of links between all members, and the controller's seconds per step.

    Tensors of several sizes cross one at a time, through the transport that training uses. A
    tensor's time is from the end of the sender's pass to the start of the receiver's pass. A line
    through the medians gives latency and bandwidth. Sums are measured between devices that may sum
    without the host, and are else assumed to be as fast as messages.
    """
    links: Links = {}
    overheads_s: list[float] = []
    for source, target in permutations(crew.infos, 2):
        times_s = []
        for nbytes in NBYTES:
            transfer_s, overhead_s = _transfer(crew, source, target, nbytes)
            times_s.append(transfer_s)
            overheads_s.append(overhead_s)
        pair = crew.cluster.links.get(frozenset((source, target)))
        links[source, target] = fit_link(times_s, "measured" if pair is None else "emulated")
    for both in combinations(crew.infos, 2):
        if may_group(crew.cluster, both, crew.infos):
            sums = fit_link([_sum_s(crew, both, nbytes) for nbytes in NBYTES], "measured")
            for ends in (both, both[::-1]):
                speed = sums.bandwidth_Bps / links[ends].bandwidth_Bps
                links[ends] = replace(links[ends], sum_speed=speed)
    if not overheads_s:
        only = next(iter(crew.infos))
        overheads_s.append(_transfer(crew, only, None, NBYTES[0])[1])
    return links, statistics.median(overheads_s)


def fit_link(times_s: list[float], label: str) -> LinkCost:
    """Return the link of a line through the seconds of messages of `NBYTES`."""
    slope, latency_s = np.polyfit(
        np.array(NBYTES, float), np.array(times_s), 1, w=1 / np.array(times_s)
    )
    return LinkCost(max(float(latency_s), 0.0), 1.0 / max(float(slope), 1e-13), label)


def _transfer(crew: Crew, source: str, target: str | None, nbytes: int) -> tuple[float, float]:
    """Return the medians of a tensor's transfer and of a step's time outside its timeline."""
    count = nbytes // 4
    members = [source] if target is None else [source, target]
    stages = [probe_stage(index, len(members), count) for index in range(len(members))]
    crew.load(stages, members, {})
    schedule = [[Action(0, Op.FORWARD, 0)]]
    if target is not None:
        schedule[0].append(Action(0, Op.SEND_FORWARD, 0))
        schedule.append([Action(1, Op.RECV_FORWARD, 0), Action(1, Op.FORWARD, 0)])
    request = _request(schedule, count)
    transfers_s, overheads_s = [], []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        result = crew.step(request)
        overheads_s.append(time.perf_counter() - start_s - result.timeline.step_s)
        spans = {str(span.action): span for span in result.timeline.spans}
        if target is not None:
            transfers_s.append(spans["1F0"].start_s - spans["0F0"].end_s)
    overhead = Samples.of(overheads_s[WARM_UP:])
    overhead.check(f"{source}: the controller's part of a step")
    if target is None:
        return 0.0, overhead.median_s
    transfer = Samples.of(transfers_s[WARM_UP:])
    transfer.check(f"{source} -> {target}: a tensor of {nbytes} bytes")
    return transfer.median_s, overhead.median_s


def _sum_s(crew: Crew, members: tuple[str, str], nbytes: int) -> float:
    """Return the median time of a sum of gradients over two members, once both have begun it.

    A ring of two takes twice a message's latency, and the time in which a message of `nbytes`
    leaves, see `hetpipe.simulate.times.ring_s`.
    """
    crew.load([[_summed_stage(nbytes // 4)] * 2], [members], {})
    request = _request([[Action(0, Op.ALL_REDUCE, 0)]], 1, samples=2)
    times_s = []
    for _ in range(ROUNDS):
        spans = crew.step(request).timeline.spans
        times_s.append(
            min(span.end_s - span.start_s for span in spans if span.action.op is Op.ALL_REDUCE)
        )
    times = Samples.of(times_s[WARM_UP:])
    times.check(f"a sum of {nbytes} bytes over {' and '.join(members)}")
    return times.median_s


def _summed_stage(count: int) -> StageGraphs:
    """Return a stage with a gradient of `count` floats. Its update changes nothing."""
    stage, graph, slot = probe_stage(0, 1, 1), fx.Graph(), Slot(GRAD, "w", (count,), "float32")
    gradient = graph.placeholder("gradient")
    gradient.meta["val"] = torch.empty(slot.shape, device="meta")
    graph.output((gradient,))
    return replace(stage, update=Program(canonical(graph), (slot,), (slot,)))


def _request(
    schedule: Sequence[Sequence[Action]], count: int, microbatches: int = 1, samples: int = 1
) -> StepRequest:
    """Return a request for micro-batches of some samples, each of `count` floats."""
    return StepRequest(
        schedule=tuple(tuple(actions) for actions in schedule),
        samples=(samples,) * microbatches,
        feeds=({"x": np.zeros((samples, count), np.float32)},) * microbatches,
        loss_tangents=(1.0,) * microbatches,
        rates={},
        number=1,
        seed=0,
        grad_scale=1.0,
    )


@cache
def small_stages() -> list[StageGraphs]:
    """Return the stages that measure links and the fixed seconds of a pass."""
    counts = [nbytes // 4 for nbytes in NBYTES]
    return [probe_stage(0, 1, 4), *(probe_stage(n, 2, count) for count in counts for n in range(2))]


def probe_stage(index: int, stages: int, count: int) -> StageGraphs:
    """Return a stage that passes on a tensor of `count` floats; the last stage sums the tensor.

    The graph is built by hand: tracing would import torch's compiler, which takes a second.
    """
    last = index == stages - 1
    role, name = (INPUT, "x") if index == 0 else (CUT, "t")
    entering = Slot(role, name, (1, count), "float32")
    leaving = Slot(LOSS, "loss", (), "float32") if last else Slot(CUT, "t", (1, count), "float32")
    graph = fx.Graph()
    x = graph.placeholder("x")
    aten = torch.ops.aten
    y = graph.call_function(
        *((aten.sum.dim_IntList, (x, [0, 1])) if last else (aten.neg.default, (x,)))
    )
    for node, slot in ((x, entering), (y, leaving)):
        node.meta["val"] = torch.empty(slot.shape, device="meta")
    graph.output((y,))
    forward = Program(canonical(graph), (entering,), (leaving,))
    return StageGraphs(stage=index, passes={1: PassPrograms(1, forward, None)})


ACTIONS = 12


def engine_s(crew: Crew, orders: Mapping[str, int]) -> dict[str, float]:
    """Return, by member, the seconds from one forward to the next, minus the program's seconds.

    The program squares a matrix; `orders` has the number of its rows, by member. The result is 0
    for a device that cannot run the program.
    """
    return {member: _beyond_s(crew, member, order) for member, order in orders.items()}


def _beyond_s(crew: Crew, member: str, order: int) -> float:
    stage = product_stage(order)
    arguments = {member: (stage, crew.emulations[member])}
    times_s: list[float] | str
    times_s = crew.call_each("hetpipe.profile.profiler:smallest", arguments)[member]
    if isinstance(times_s, str):
        return 0.0
    crew.load([stage], [member], {})
    forwards = [Action(0, Op.FORWARD, number) for number in range(ACTIONS)]
    request = _request([forwards], order * order, ACTIONS)
    starts_s = [span.start_s for span in crew.step(request).timeline.spans]
    between = Samples.of(after - before for before, after in pairwise(starts_s[WARM_UP:]))
    between.check(f"{member} ({crew.infos[member].id}): a forward")
    return max(between.median_s - statistics.median(times_s), 0.0)


@cache
def product_stage(order: int) -> StageGraphs:
    """Return a stage that squares its input, a matrix of `order` rows."""

    def body(x: torch.Tensor) -> tuple[Any, ...]:
        square = x.reshape(order, order)
        return (torch.sum(square @ square, (0, 1)),)

    graph = canonical(make_fx(body)(torch.zeros(1, order * order)))
    entering = Slot(INPUT, "x", (1, order * order), "float32")
    forward = Program(graph, (entering,), (Slot(LOSS, "loss", (), "float32"),))
    return StageGraphs(stage=0, passes={1: PassPrograms(1, forward, None)})
