"""Measures a cluster: every layer on every device, every link, the fixed costs -> CostTable."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

import hetpipe
from hetpipe.capture.captured import Captured
from hetpipe.capture.program import PARAM, StageGraphs
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, LayerCost, TiedBytes
from hetpipe.crew.crew import Crew
from hetpipe.errors import CostError
from hetpipe.profile import cache, contention
from hetpipe.profile.links import Links, measure_links, probe_stage
from hetpipe.profile.profiler import RULES, Times
from hetpipe.sdk.registry import decompositions_of
from hetpipe.wire.pieces import streams

if TYPE_CHECKING:
    from hetpipe.optim.rule import Optimizer

Progress = Callable[[str, int, int], None]
Rows = dict[str, list[Times | str]]
"""Times of every layer by member; a reason in place of the times if it cannot run."""
Stages = dict[str, list[StageGraphs]]
"""The network by member, a stage per layer."""


def profile(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    samples: Sequence[int],
    progress: Progress | None = None,
) -> dict[int, CostTable]:
    """A table per micro-batch size in `samples`, from the cache on disk where nothing has changed.

    All devices are measured at the same time, as they will run. Every size is measured twice, some
    time apart, and the quicker time counts, since other work only slows a machine down. Times of a
    member with an emulated speed, or of an emulator, are labelled emulated. Costs that were
    measured while other work took part of the cores are used, with a `ContentionWarning`, and not
    stored.
    """
    say = progress or (lambda text, done, total: None)
    entries = _entries(captured, crew, optimizer, samples)
    tables = _stored(entries)
    missing = [size for size in samples if size not in tables]
    if missing:
        stages = {size: _layer_stages(captured, crew, optimizer, size) for size in missing}
        rows, foreign = _measure_twice(crew, stages, say)
        overheads_s = _empty_s(crew)
        links, step_overhead_s = _links(tables, crew)
        for size in missing:
            devices = _device_costs(crew, rows[size], overheads_s)
            tables[size] = CostTable(
                model=captured.name,
                samples=size,
                layers=_layer_bytes(captured, _any_member(stages[size]), size),
                devices=devices,
                links=links,
                step_overhead_s=step_overhead_s,
                tied=_tied(_any_member(stages[size]), size),
            )
            if foreign[size] <= contention.LIMIT:
                cache.store(entries[size], tables[size].to_json())
        _warn_of_contention(foreign)
    say("profiled", len(samples), len(samples))
    return {size: tables[size] for size in samples}


def stored_costs(
    captured: Captured, crew: Crew, optimizer: Optimizer, samples: Sequence[int]
) -> dict[int, CostTable]:
    """Those of the tables that an earlier `profile` has stored; nothing is measured."""
    return _stored(_entries(captured, crew, optimizer, samples))


def _stored(entries: Mapping[int, str]) -> dict[int, CostTable]:
    contents = {size: cache.load(entry) for size, entry in entries.items()}
    return {size: CostTable.from_json(data) for size, data in contents.items() if data is not None}


def _entries(
    captured: Captured, crew: Crew, optimizer: Optimizer, samples: Sequence[int]
) -> dict[int, str]:
    """The names in the cache, by micro-batch size: they differ if costs may differ."""
    parts = {
        "model": captured.fingerprint,
        "optimizer": [optimizer.name, *map(list, optimizer.hyperparameters)],
        "versions": [hetpipe.__version__, torch.__version__, RULES],
        "members": [
            [asdict(member), asdict(crew.infos[member.id])] for member in crew.cluster.members
        ],
        "links": sorted([sorted(pair), asdict(link)] for pair, link in crew.cluster.links.items()),
        "transport": crew.cluster.transport,
    }
    return {size: cache.key({**parts, "samples": size}) for size in samples}


def _measure_twice(
    crew: Crew, stages: Mapping[int, Stages], say: Progress
) -> tuple[dict[int, Rows], dict[int, float]]:
    """By micro-batch size, the least of all times, and other work's least share of the cores."""
    measured: dict[int, list[Rows]] = {size: [] for size in stages}
    foreign = dict.fromkeys(stages, 1.0)
    for turn, size in enumerate([*stages, *stages]):
        say(f"profiling micro-batches of {size}", turn, 2 * len(stages))
        before = _usage(crew)
        measured[size].append(_measure_members(crew, stages[size], size))
        foreign[size] = min(foreign[size], contention.foreign_share(before, _usage(crew)))
    return {size: _quickest(rows) for size, rows in measured.items()}, foreign


def _usage(crew: Crew) -> list[contention.Usage]:
    return crew.call(list(crew.infos), "hetpipe.profile.contention:usage")


def _warn_of_contention(foreign: Mapping[int, float]) -> None:
    """Warns of the micro-batch sizes during which other work had a large share of the cores."""
    disturbed = {size: share for size, share in foreign.items() if share > contention.LIMIT}
    if disturbed:
        text = (
            f"other work took {max(disturbed.values()):.0%} of the cores (at most "
            f"{contention.LIMIT:.0%} leaves costs as they are) while micro-batches of "
            f"{', '.join(map(str, disturbed))} were profiled: these costs are too high, and are "
            "not kept for later runs; profile again when the machine is quiet"
        )
        warnings.warn(text, contention.ContentionWarning, stacklevel=3)


def _links(tables: Mapping[int, CostTable], crew: Crew) -> tuple[Links, float]:
    """The links, measured once, since they do not depend on the micro-batch size."""
    for table in tables.values():
        return dict(table.links), table.step_overhead_s
    return measure_links(crew)


def _layer_stages(captured: Captured, crew: Crew, optimizer: Optimizer, samples: int) -> Stages:
    """The network cut after every layer, by member: in the operators of its backend."""
    count = len(captured.layer_graph(samples).layers)
    by_backend: dict[str, list[StageGraphs]] = {}
    for name in dict.fromkeys(info.backend for info in crew.infos.values()):
        tables = [decompositions_of(name)] * count
        by_backend[name] = captured.stage_graphs(
            range(1, count), tables, [samples], optimizer, extras=()
        )
    return {member: by_backend[info.backend] for member, info in crew.infos.items()}


def _any_member(stages: Stages) -> list[StageGraphs]:
    """The stages of some member: bytes and ties are the same in the operators of every backend."""
    return next(iter(stages.values()))


def _device_costs(
    crew: Crew, rows: Rows, overheads_s: Mapping[str, float]
) -> dict[str, DeviceCost]:
    devices = {}
    for member in crew.cluster.members:
        info = crew.infos[member.id]
        devices[member.id] = DeviceCost(
            layers=tuple(_layer_cost(entry) for entry in rows[member.id]),
            overhead_s=overheads_s[member.id],
            memory_nbytes=info.memory_nbytes,
            memory_domain=info.memory_domain,
            execution="async" if streams(info) and member.speed == 1.0 else "sync",
            label=crew.label_of(member),
        )
    return devices


def _layer_bytes(
    captured: Captured, stages: Sequence[StageGraphs], samples: int
) -> tuple[LayerBytes, ...]:
    graph = captured.layer_graph(samples)
    return tuple(
        LayerBytes(
            name=layer.name,
            params_nbytes=layer.params_nbytes,
            state_nbytes=_state_nbytes(stage),
            saved_nbytes=stage.passes[samples].saved_nbytes,
            cut_nbytes=cut_nbytes,
        )
        for layer, stage, cut_nbytes in zip(
            graph.layers, stages, (*graph.cut_nbytes, 0), strict=True
        )
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


def _measure_members(crew: Crew, stages: Stages, samples: int) -> Rows:
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
    """The fixed seconds of any compute action, by member: those of the smallest graph."""
    probe = [probe_stage(0, 1, 4)]
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
