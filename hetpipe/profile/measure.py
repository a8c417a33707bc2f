"""Measures a cluster: every layer on every device, every link, the fixed costs -> CostTable."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import permutations
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import hetpipe
from hetpipe.capture.captured import Captured
from hetpipe.capture.program import (
    CUT,
    INPUT,
    LOSS,
    PARAM,
    PassPrograms,
    Program,
    Slot,
    StageGraphs,
)
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, LinkCost, TiedBytes
from hetpipe.crew.crew import Crew
from hetpipe.crew.request import StepRequest
from hetpipe.errors import CostError
from hetpipe.profile import cache, contention
from hetpipe.profile.profiler import RULES, Times
from hetpipe.schedule.action import Action, Op
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.registry import get_backend
from hetpipe.wire.pieces import streams

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer

Progress = Callable[[str, int, int], None]
Rows = dict[str, list[Times | str]]
"""Times of every layer by member; a text where it cannot run."""

LINK_NBYTES = (4 << 10, 256 << 10, 4 << 20)
LINK_ROUNDS = 12


def profile(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    samples: Sequence[int],
    progress: Progress | None = None,
) -> dict[int, CostTable]:
    """A table per micro-batch size in `samples`, from the cache on disk where nothing has changed.

    Devices that share memory are measured at the same time, as they will run; every size twice,
    some time apart, of which the quicker counts: what else a machine does only slows it down.
    Times of a member with an emulated speed, or of an emulator, are labelled emulated. Costs that
    were measured while other work took part of the cores are used, with a `ContentionWarning`,
    and not stored.
    """
    say = progress or (lambda text, done, total: None)
    key = {
        "model": captured.fingerprint,
        "optimizer": [optimizer.name, *map(list, optimizer.hyperparameters)],
        "versions": [hetpipe.__version__, torch.__version__, RULES],
        "members": [
            [asdict(member), asdict(crew.infos[member.id])] for member in crew.cluster.members
        ],
        "links": sorted([sorted(pair), asdict(link)] for pair, link in crew.cluster.links.items()),
        "transport": crew.cluster.transport,
    }
    entries = {size: cache.key({**key, "samples": size}) for size in samples}
    stored = {size: cache.load(entry) for size, entry in entries.items()}
    tables = {size: CostTable.from_json(data) for size, data in stored.items() if data is not None}
    missing = [size for size in samples if size not in tables]
    stages = {size: _layer_stages(captured, crew, optimizer, size) for size in missing}
    found: dict[int, list[Rows]] = {size: [] for size in missing}
    foreign = dict.fromkeys(missing, 1.0)
    for turn, size in enumerate([*missing, *missing]):
        say(f"profiling micro-batches of {size}", turn, 2 * len(missing))
        before = _usage(crew)
        found[size].append(_measure_members(crew, stages[size], size))
        foreign[size] = min(foreign[size], contention.foreign_share(before, _usage(crew)))
    overheads_s = _empty_s(crew) if missing else {}
    for size in missing:
        links, step_overhead_s = _links(tables, crew)
        tables[size] = _table(
            captured, crew, size, stages[size], _quickest(found[size]), overheads_s, links,
            step_overhead_s,
        )  # fmt: skip
        if foreign[size] <= contention.LIMIT:
            cache.store(entries[size], tables[size].to_json())
    _warn_of_contention(foreign)
    say("profiled", len(samples), len(samples))
    return {size: tables[size] for size in samples}


def _usage(crew: Crew) -> list[contention.Usage]:
    return crew.call(list(crew.infos), "hetpipe.profile.contention:usage")


def _warn_of_contention(foreign: dict[int, float]) -> None:
    """Of micro-batch sizes, by the share of the cores that other work had."""
    disturbed = {size: share for size, share in foreign.items() if share > contention.LIMIT}
    if disturbed:
        text = (
            f"other work took {max(disturbed.values()):.0%} of the cores (at most "
            f"{contention.LIMIT:.0%} leaves costs as they are) while micro-batches of "
            f"{', '.join(map(str, disturbed))} were profiled: these costs are too high, and are "
            "not kept for later runs; profile again when the machine is quiet"
        )
        warnings.warn(text, contention.ContentionWarning, stacklevel=3)


def _links(
    tables: dict[int, CostTable], crew: Crew
) -> tuple[dict[tuple[str, str], LinkCost], float]:
    """Links do not depend on the micro-batch size: measure them once."""
    for table in tables.values():
        return dict(table.links), table.step_overhead_s
    return measure_links(crew)


def _layer_stages(
    captured: Captured, crew: Crew, optimizer: Optimizer, samples: int
) -> dict[str, list[StageGraphs]]:
    """The network cut behind every layer, by member: in the operators of its backend."""
    count = len(captured.layer_graph(samples).layers)
    by_backend: dict[str, list[StageGraphs]] = {}
    for name in dict.fromkeys(info.backend for info in crew.infos.values()):
        tables = [get_backend(name).decompositions()] * count
        by_backend[name] = captured.stage_graphs(range(1, count), tables, [samples], optimizer)
    return {member: by_backend[info.backend] for member, info in crew.infos.items()}


def _table(
    captured: Captured,
    crew: Crew,
    samples: int,
    stages: dict[str, list[StageGraphs]],
    rows: Rows,
    overheads_s: dict[str, float],
    links: dict[tuple[str, str], LinkCost],
    step_overhead_s: float,
) -> CostTable:
    graph = captured.layer_graph(samples)
    devices = {}
    for member in crew.cluster.members:
        info = crew.infos[member.id]
        emulated = member.speed != 1.0 or info.capabilities.emulated
        devices[member.id] = DeviceCost(
            layers=tuple(_layer_cost(entry) for entry in rows[member.id]),
            overhead_s=overheads_s[member.id],
            memory_nbytes=info.memory_nbytes,
            memory_domain=info.memory_domain,
            execution="async" if streams(info) and member.speed == 1.0 else "sync",
            label="emulated" if emulated else "measured",
        )
    layers = next(iter(stages.values()))
    return CostTable(
        model=captured.name,
        samples=samples,
        layers=tuple(
            LayerBytes(
                name=layer.name,
                params_nbytes=layer.params_nbytes,
                state_nbytes=_state_nbytes(stage),
                saved_nbytes=stage.passes[samples].saved_nbytes,
                cut_nbytes=cut_nbytes,
            )
            for layer, stage, cut_nbytes in zip(
                graph.layers, layers, (*graph.cut_nbytes, 0), strict=True
            )
        ),
        devices=devices,
        links=links,
        step_overhead_s=step_overhead_s,
        tied=_tied(layers, samples),
    )


def _tied(stages: Sequence[StageGraphs], samples: int) -> tuple[TiedBytes, ...]:
    """The parameters that several layers share; here every stage is one layer."""
    sizes = {
        slot.name: slot.nbytes
        for stage in stages
        for slot in stage.passes[samples].forward.inputs
        if slot.role == PARAM
    }
    shared = {name: (owner, *others) for stage in stages for name, owner, others in stage.tied}
    return tuple(TiedBytes(name, sizes[name], layers) for name, layers in shared.items())


def _measure_members(crew: Crew, stages: dict[str, list[StageGraphs]], samples: int) -> Rows:
    speeds = {member.id: member.speed for member in crew.cluster.members}
    arguments = {member: (own, samples, speeds[member]) for member, own in stages.items()}
    return crew.call_each("hetpipe.profile.profiler:measure_layers", arguments)


def _quickest(measured: Sequence[Rows]) -> Rows:
    """The least of every time."""
    return {
        member: [
            _least(entries) for entries in zip(*(rows[member] for rows in measured), strict=True)
        ]
        for member in measured[0]
    }


def _least(entries: Sequence[Times | str]) -> Times | str:
    times = [entry for entry in entries if not isinstance(entry, str)]
    if len(times) < len(entries):
        return next(entry for entry in entries if isinstance(entry, str))
    forward_s, backward_s, update_s = map(min, zip(*times, strict=True))
    return forward_s, backward_s, update_s


def _empty_s(crew: Crew) -> dict[str, float]:
    """What any compute action costs each member: seconds of the smallest graph there is."""
    probe = [_probe_stage(0, 1, 4)]
    rows = _measure_members(crew, dict.fromkeys(crew.infos, probe), 1)
    overheads_s = {}
    for member, (entry,) in rows.items():
        if isinstance(entry, str):
            raise CostError(f"{member} cannot run the smallest graph there is: {entry}")
        overheads_s[member] = entry[0]
    return overheads_s


def _layer_cost(entry: Times | str) -> LayerCost:
    if isinstance(entry, str):
        return LayerCost(float("inf"), float("inf"), float("inf"), reason=entry)
    return LayerCost(*entry)


def _state_nbytes(stage: StageGraphs) -> int:
    if stage.update is None:
        return 0
    return sum(slot.nbytes for slot in stage.update.inputs if slot.role == "state")


def measure_links(crew: Crew) -> tuple[dict[tuple[str, str], LinkCost], float]:
    """Latency and bandwidth of every ordered pair of members, and the cost of a step around them.

    Tensors of several sizes cross alone, through the transport that training uses; a line through
    the medians gives both figures.
    """
    links: dict[tuple[str, str], LinkCost] = {}
    overheads_s: list[float] = []
    for source, target in permutations(crew.infos, 2):
        times_s = []
        for nbytes in LINK_NBYTES:
            transfer_s, overhead_s = _transfer(crew, source, target, nbytes)
            times_s.append(transfer_s)
            overheads_s.append(overhead_s)
        pair = crew.cluster.links.get(frozenset((source, target)))
        links[source, target] = _fit(times_s, "measured" if pair is None else "emulated")
    if not overheads_s:
        only = next(iter(crew.infos))
        overheads_s.append(_transfer(crew, only, None, LINK_NBYTES[0])[1])
    return links, statistics.median(overheads_s)


def _fit(times_s: list[float], label: str) -> LinkCost:
    slope, latency_s = np.polyfit(
        np.array(LINK_NBYTES, float), np.array(times_s), 1, w=1 / np.array(times_s)
    )
    return LinkCost(max(float(latency_s), 0.0), 1.0 / max(float(slope), 1e-13), label)


def _transfer(crew: Crew, source: str, target: str | None, nbytes: int) -> tuple[float, float]:
    """Median seconds for one tensor, and for the step beyond its own actions."""
    count = nbytes // 4
    members = [source] if target is None else [source, target]
    stages = [_probe_stage(index, len(members), count) for index in range(len(members))]
    crew.load(stages, members, {})
    schedule = [[Action(0, Op.FORWARD, 0)]]
    if target is not None:
        schedule[0].append(Action(0, Op.SEND_FORWARD, 0))
        schedule.append([Action(1, Op.RECV_FORWARD, 0), Action(1, Op.FORWARD, 0)])
    request = StepRequest(
        schedule=tuple(tuple(actions) for actions in schedule),
        samples=(1,),
        feeds=({"x": np.zeros((1, count), np.float32)},),
        loss_tangents=(1.0,),
        lr=0.0,
        number=1,
        seed=0,
        grad_scale=1.0,
    )
    transfers_s, overheads_s = [], []
    for _ in range(LINK_ROUNDS):
        start_s = time.perf_counter()
        result = crew.step(request)
        overheads_s.append(time.perf_counter() - start_s - result.timeline.step_s)
        spans = {str(span.action): span for span in result.timeline.spans}
        if target is not None:
            transfers_s.append(spans["1RF0"].end_s - spans["0SF0"].start_s)
    warm = transfers_s[2:] or [0.0]
    return statistics.median(warm), statistics.median(overheads_s[2:])


def _probe_stage(index: int, stages: int, count: int) -> StageGraphs:
    """A stage that passes a tensor of `count` floats on, or ends with its sum."""
    last = index == stages - 1
    role, name = (INPUT, "x") if index == 0 else (CUT, "t")
    entering = Slot(role, name, (1, count), "float32")

    def body(x: torch.Tensor) -> tuple[Any, ...]:
        return (torch.sum(x, (0, 1)),) if last else (-x,)

    graph = canonical(make_fx(body)(torch.zeros(1, count)))
    leaving = Slot(LOSS, "loss", (), "float32") if last else Slot(CUT, "t", (1, count), "float32")
    forward = Program(graph, (entering,), (leaving,))
    return StageGraphs(stage=index, passes={1: PassPrograms(1, forward, None)})
