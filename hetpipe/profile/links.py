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
from itertools import combinations, pairwise
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
from hetpipe.hosts.meeting import is_loopback
from hetpipe.profile.clock import Samples
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk.graph import canonical

NBYTES = (4 << 10, 256 << 10, 4 << 20)
ROUNDS = 12
SHORT_NBYTES = 4
WARM_UP = 2  # number of first rounds, and of first actions, that do not count

Way = tuple[str, str]  # sending member, receiving member
Links = dict[Way, LinkCost]
"""The costs of links by (source, target)."""


def measure_links(crew: Crew) -> tuple[Links, float]:
    """Return the costs of links between all members, and the controller's seconds per step.

    Tensors of several sizes cross one at a time, through the transport that training uses. A
    tensor's time is from the end of the sender's pass to the start of the receiver's pass. A line
    through the medians gives latency and bandwidth. Between two hosts, links of equal kinds of
    devices are measured once, and otherwise inferred. Sums are measured between devices that may
    sum without the host, and are else assumed to be as fast as messages.
    """
    links: Links = {}
    overheads_s: list[float] = []
    alike: dict[Any, LinkCost] = {}
    networked = networked_hosts(crew)
    for both in combinations(crew.infos, 2):
        ways = both, both[::-1]
        kinds = [_kind(crew, *way) for way in ways]
        if kinds[0] in alike:
            for way, kind in zip(ways, kinds, strict=True):
                label = "inferred" if alike[kind].label == "measured" else alike[kind].label
                links[way] = replace(alike[kind], label=label)
            continue
        hosts = {crew.cluster.member(member).host for member in both}
        label = "emulated" if frozenset(both) in crew.cluster.links else "measured"
        copying = 0.0 if len(hosts) > 1 and hosts <= networked else LinkCost.copying
        for way, kind in zip(ways, kinds, strict=True):
            times_s = _far_s(crew, way) if len(hosts) > 1 else _near_s(crew, way, overheads_s)
            links[way] = alike[kind] = replace(fit_link(times_s, label), copying=copying)
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


def networked_hosts(crew: Crew) -> set[str]:
    """Return the hosts whose messages to each other cross a network."""
    connections = crew.cluster.connections
    if connections is None:
        return set()
    others = connections.others.items()
    outside = {name for name, other in others if not is_loopback(other.door[0])}
    return outside | {connections.own.name} if outside else set()


def _kind(crew: Crew, source: str, target: str) -> Any:
    """Return a key that is equal for links with equal costs.

    Between hosts a link depends on the hosts, and on the ways from devices to memory of the hosts.
    """
    here, there = map(crew.cluster.member, (source, target))
    if here.host == there.host:
        return source, target
    infos = crew.infos[source], crew.infos[target]
    devices = ["" if info.on_cores else (info.backend, info.name) for info in infos]
    return here.host, there.host, *devices, crew.cluster.links.get(frozenset((source, target)))


def _near_s(crew: Crew, way: Way, overheads_s: list[float]) -> list[float]:
    """Return the median times of messages of `NBYTES` inside a host, and add the controller's
    times of a step."""
    times_s = []
    for nbytes in NBYTES:
        transfer_s, overhead_s = _transfer(crew, *way, nbytes)
        times_s.append(transfer_s)
        overheads_s.append(overhead_s)
    return times_s


def _far_s(crew: Crew, way: Way) -> list[float]:
    """Return the median times of messages of `NBYTES` between hosts, whose clocks differ.

    So all times are by the sender's clock, when a short answer has come. The answer's time is half
    of a round trip of two short messages.
    """
    least_s, *trips_s = (_trip_s(crew, way, nbytes) for nbytes in (SHORT_NBYTES, *NBYTES))
    return [trip_s - least_s / 2 for trip_s in trips_s]


def _trip_s(crew: Crew, way: Way, nbytes: int) -> float:
    (times_s,) = round_trips(crew, [way], nbytes, ROUNDS)
    samples = Samples.of(times_s[WARM_UP:])
    samples.check(f"{way[0]} -> {way[1]}: a tensor of {nbytes} bytes")
    return samples.median_s


def round_trips(crew: Crew, ways: Sequence[Way], nbytes: int, rounds: int) -> list[list[float]]:
    """Return, by way, the times of tensors that all leave at once, each until a short answer.

    The times of the passes at the targets do not count.
    """
    count, stages = nbytes // 4, []
    rows: dict[str, list[Action]] = {member: [] for way in ways for member in way}
    members = [member for source, target in ways for member in (source, target, source)]
    for place in range(0, len(members), 3):
        stages += [replace(stage, stage=place + n) for n, stage in enumerate(_echo(count))]
    legs = (
        (0, (Op.FORWARD,)), (0, (Op.SEND_FORWARD,)),
        (1, (Op.RECV_FORWARD, Op.FORWARD, Op.SEND_FORWARD)), (2, (Op.RECV_FORWARD, Op.FORWARD)),
    )  # fmt: skip
    for leg, ops in legs:
        for place in range(leg, len(members), 3):
            rows[members[place]] += [Action(place, op, 0) for op in ops]
    crew.load(stages, members, {})
    request = probe_request(list(rows.values()), 1)
    times_s: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        spans = {str(span.action): span for span in crew.step(request).timeline.spans}
        for number in range(len(ways)):
            out, there, back = (spans[f"{3 * number + leg}F0"] for leg in range(3))
            taken_s = back.start_s - out.end_s - (there.end_s - there.start_s)
            times_s[number].append(taken_s)
    return times_s


def _echo(count: int) -> list[StageGraphs]:
    """Return three stages: the first makes a tensor of `count` floats, the second gets it, and the
    third gets its sum. Their input is small, as it may travel at the same time."""
    short, wide = ((1, 1), (1, count))
    aten = torch.ops.aten
    x, t, s, loss = (
        Slot(INPUT, "x", short, "float32"), Slot(CUT, "t", wide, "float32"),
        Slot(CUT, "s", short, "float32"), Slot(LOSS, "loss", (), "float32"),
    )  # fmt: skip
    programs: tuple[tuple[Slot, Slot, Sequence[Any]], ...] = (
        (x, t, [(aten.expand.default, (list(wide),), wide), (aten.neg.default, (), wide)]),
        (t, s, [(aten.sum.dim_IntList, ([0, 1], True), short)]),
        (s, loss, [(aten.sum.dim_IntList, ([0, 1],), ())]),
    )
    return [_stage(number, *program) for number, program in enumerate(programs)]


def _stage(number: int, entering: Slot, leaving: Slot, calls: Sequence[Any]) -> StageGraphs:
    """Return a stage that passes a tensor through `calls`: functions, more arguments, shapes."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(entering.shape, device="meta")
    for function, arguments, shape in calls:
        node = graph.call_function(function, (node, *arguments))
        node.meta["val"] = torch.empty(shape, device="meta")
    graph.output((node,))
    forward = Program(canonical(graph), (entering,), (leaving,))
    return StageGraphs(stage=number, passes={1: PassPrograms(1, forward, None)})


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
    request = probe_request(schedule, count)
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
    request = probe_request([[Action(0, Op.ALL_REDUCE, 0)]], 1, samples=2)
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


def probe_request(
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
    last, aten = index == stages - 1, torch.ops.aten
    shape = (1, count)
    entering = Slot(*((INPUT, "x") if index == 0 else (CUT, "t")), shape, "float32")
    if last:
        leaving = Slot(LOSS, "loss", (), "float32")
        return _stage(index, entering, leaving, [(aten.sum.dim_IntList, ([0, 1],), ())])
    leaving = Slot(CUT, "t", shape, "float32")
    return _stage(index, entering, leaving, [(aten.neg.default, (), shape)])


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
    request = probe_request([forwards], order * order, ACTIONS)
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
