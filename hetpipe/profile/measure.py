"""Measures a cluster: every layer on every device, every link, and the fixed costs."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from hetpipe.capture.captured import Captured
from hetpipe.capture.program import OUTPUT, PARAM, StageGraphs
from hetpipe.cost.table import CostTable, DeviceCost, LayerBytes, TiedBytes
from hetpipe.crew.crew import Crew
from hetpipe.crew.workers import share_operators
from hetpipe.errors import ClusterError, CostError
from hetpipe.profile import contention, warm
from hetpipe.profile.cards import with_cards
from hetpipe.profile.clock import Samples
from hetpipe.profile.drift import drifts_since, probe_again, probes_of
from hetpipe.profile.estimate import Series
from hetpipe.profile.links import Links, engine_s, measure_links, probe_stage
from hetpipe.profile.patterns import Network
from hetpipe.profile.probing import Probes
from hetpipe.profile.room import with_room
from hetpipe.profile.rounds import HALF_S, Effort, Rounds
from hetpipe.profile.stored import entries_of, load_tables, store_table
from hetpipe.sdk.host.registry import decompositions_of
from hetpipe.wire.wire import streams

if TYPE_CHECKING:
    from hetpipe.cost.probe import Probe
    from hetpipe.optim.rule import Optimizer

Progress = Callable[[str, int, int], None]
SMALL_DRIFT = 0.05
"""Stored costs are not corrected for drifts up to this share, so that plans stay the same."""

log = logging.getLogger(__name__)


def profile(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    samples: Sequence[int],
    progress: Progress | None = None,
    report: Callable[[Effort], None] | None = None,
    half_s: float = HALF_S,
    again: bool = False,
) -> dict[int, CostTable]:
    """Return a table per micro-batch size in `samples`; valid tables come from the cache on disk.

    All devices are measured at the same time, since training also uses them at the same time
    (`hetpipe.profile.rounds`). Times of a member with an emulated speed, or of an emulator, are
    labelled emulated. Costs that were measured while other work used a large part of the cores are
    marked. Marked costs are used, now and later, with a `ContentionWarning`; `again` repeats all
    measurements. Stored costs are corrected for the drift of the devices since they were measured.

    `report` gets the effort of a measurement; it is not called if nothing is measured. Each of the
    two halves of a measurement takes `half_s` seconds or more. Raises `CostError` for a device
    without credible times, and `ClusterError` for boards, whose costs are modelled.
    """
    if boards := [member.id for member in crew.cluster.described]:
        raise ClusterError(
            f"{', '.join(boards)}: boards are not profiled, because numerics do not run at a "
            "board's speed; model boards with `hetpipe plan`, or leave them out of the cluster"
        )
    say = progress or (lambda text, done, total: None)
    entries = entries_of(captured, crew, optimizer, samples)
    tables = {} if again else load_tables(entries, crew)
    for share in {table.contention for table in tables.values() if table.contention}:
        marked = [size for size, table in tables.items() if table.contention == share]
        _warn_of_contention(share, marked)
    missing = [size for size in samples if size not in tables]
    tables = _as_now(tables, crew)
    if missing:
        say(f"compiling for micro-batches of {_listed(missing)}", 0, 2)
        warm.begin(crew)
        share_operators(captured, crew)
        stages: dict[str, list[StageGraphs]] = {}
        networks = _networks(captured, crew, optimizer, missing, stages)
        rounds = Rounds(crew, networks, missing, half_s)
        say(f"profiling micro-batches of {_listed(missing)}", 0, 2)
        overheads_s = _empty_s(crew)
        with Probes(crew, list(crew.infos), _probes_of_any(tables)) as probes:
            beyond_s = engine_s(crew, probes.orders)
            rounds.half(probes)
            links, step_overhead_s = _links(tables, crew)
            say(f"profiling micro-batches of {_listed(missing)}", 1, 2)
            rounds.half(probes)
        series = rounds.finish()
        _tell(rounds.effort, report)
        any_backend = next(iter(stages.values()))
        for size in missing:
            tables[size] = CostTable(
                model=captured.name,
                samples=size,
                layers=layer_bytes(captured, any_backend, size),
                devices=_device_costs(crew, rounds, series, size, overheads_s, beyond_s),
                links=links,
                step_overhead_s=step_overhead_s,
                tied=tied_bytes(captured, any_backend, size),
                contention=contention.mark(rounds.foreign),
                trains=captured.trains,
            )
            store_table(entries[size], tables[size], crew)
        if rounds.foreign > contention.LIMIT:
            _warn_of_contention(rounds.foreign, missing)
    say("profiled", len(samples), len(samples))
    return with_room({size: tables[size] for size in samples}, crew)


def _as_now(tables: dict[int, CostTable], crew: Crew) -> dict[int, CostTable]:
    """Return stored tables, corrected for drifts above `SMALL_DRIFT`."""
    members = list(crew.infos)
    # Tables of one profile have the same probes; tables of two profiles may have different probes.
    now: dict[frozenset[tuple[str, int, int]], dict[str, Probe]] = {}
    corrected = {}
    for size, table in tables.items():
        programs = frozenset((id, p.order, p.nbytes) for id, p in probes_of(table).items())
        if programs not in now:
            now[programs] = probe_again(crew, table, members)
        drifts = drifts_since(table, now[programs], len(members))
        large = {id: one for id, one in drifts.items() if abs(one.factor - 1) > SMALL_DRIFT}
        corrected[size] = table.drifted(large)
    return corrected


def _probes_of_any(tables: Mapping[int, CostTable]) -> dict[str, Probe]:
    """Return probes whose programs the next probes should repeat; empty without tables."""
    return next((probes_of(table) for table in tables.values()), {})


def _tell(effort: Effort, report: Callable[[Effort], None] | None) -> None:
    log.info(
        "profiled %d layers of %d patterns: %d compilations and %d runs on all devices, %.1f s",
        effort.layers, effort.patterns, effort.compilations, effort.runs, effort.measured_s,
    )  # fmt: skip
    if report is not None:
        report(effort)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def _warn_of_contention(foreign: float, sizes: Sequence[int]) -> None:
    """Warn that other work used a large share of the cores while these sizes were profiled."""
    text = (
        f"other work took {foreign:.0%} of the cores (costs are reliable up to "
        f"{contention.LIMIT:.0%}) while micro-batches of {_listed(sizes)} were profiled, so "
        "predictions by these costs are unreliable here; measure again when the machine is quiet, "
        "with `hetpipe profile MODEL --again`"
    )
    warnings.warn(text, contention.ContentionWarning, stacklevel=3)


def _links(tables: Mapping[int, CostTable], crew: Crew) -> tuple[Links, float]:
    """Return the links, and the controller's seconds per step.

    Neither depends on the micro-batch size, so both are measured only if there are no tables.
    """
    for table in tables.values():
        return dict(table.links), table.step_overhead_s
    links, step_overhead_s = measure_links(crew)
    return with_cards(crew, links), step_overhead_s


def _networks(
    captured: Captured,
    crew: Crew,
    optimizer: Optimizer,
    sizes: Sequence[int],
    stages: dict[str, list[StageGraphs]],
) -> Iterator[tuple[list[str], Network]]:
    """Yield, for each backend, its members and the network in the operators of this backend.

    The network is cut after every layer. Its stages are added to `stages`, by backend. Backends
    that compile ahead come first, and begin to compile for the first size.
    """
    count = len(captured.layer_graph(sizes[0]).layers)
    members: dict[str, list[str]] = {}
    for member, info in crew.infos.items():
        members.setdefault(info.backend, []).append(member)

    def traced(backend: str, sizes: Sequence[int]) -> list[StageGraphs]:
        tables = [decompositions_of(backend)] * count
        return captured.stage_graphs(range(1, count), tables, sizes, optimizer, extras=())

    ahead = {name for name, own in members.items() if any(map(crew.compiles_ahead, own))}
    for name in sorted(members, key=lambda name: name not in ahead):
        if name in ahead and len(sizes) > 1:
            patterns = Network.of(traced(name, sizes[:1])).patterns
            crew.compile_ahead(dict.fromkeys(members[name], patterns))
        stages[name] = traced(name, sizes)
        yield members[name], Network.of(stages[name])


def _device_costs(
    crew: Crew,
    rounds: Rounds,
    series: Mapping[str, Series],
    size: int,
    overheads_s: Mapping[str, float],
    beyond_s: Mapping[str, float],
) -> dict[str, DeviceCost]:
    """Return the costs of all members.

    `beyond_s`, the engine's part of an action, is added to the times of each layer and to the fixed
    seconds, which these times include. A stage counts the fixed seconds once, so also this part.
    """
    devices = {}
    for member in crew.cluster.members:
        own = series[member.id]
        info = crew.infos[member.id]
        probe, probe_alone = rounds.probes(member.id)
        engine = beyond_s.get(member.id, 0.0)
        devices[member.id] = DeviceCost(
            layers=tuple(layer.delayed(engine) for layer in own.layers(size)),
            overhead_s=overheads_s[member.id] + engine,
            memory_nbytes=info.memory_nbytes,
            memory_domain=info.memory_domain,
            execution="async" if streams(info) and member.speed == 1.0 else "sync",
            label=crew.label_of(member),
            spread=own.spread(size),
            alone=own.alone_factor(rounds.alone_size),
            probe=probe,
            probe_alone=probe_alone,
        )
    return devices


def layer_bytes(
    captured: Captured, stages: Sequence[StageGraphs], samples: int
) -> tuple[LayerBytes, ...]:
    """Return the bytes of every layer; each of `stages` has one layer.

    In forwards alone the model's output crosses the end of the last layer.
    """
    graph = captured.layer_graph(samples)
    results = stages[-1].passes[samples].forward.outputs if not captured.trains else ()
    last = sum(slot.nbytes for slot in results if slot.role == OUTPUT)
    return tuple(
        LayerBytes(
            name=layer.name,
            params_nbytes=layer.params_nbytes,
            state_nbytes=_state_nbytes(stage),
            saved_nbytes=stage.passes[samples].saved_nbytes,
            cut_nbytes=cut_nbytes,
        )
        for layer, stage, cut_nbytes in zip(
            graph.layers, stages, (*graph.cut_nbytes, last), strict=True
        )
    )


def tied_bytes(
    captured: Captured, stages: Sequence[StageGraphs], samples: int
) -> tuple[TiedBytes, ...]:
    """Return the parameters that several layers share; each of `stages` has one layer.

    In a training these are only trained parameters, because the others are not sent.
    """
    sizes: dict[str, int] = {}
    readers: dict[str, tuple[int, ...]] = {}
    for stage in stages:
        for slot in stage.passes[samples].forward.inputs:
            if slot.role == PARAM:
                sizes[slot.name] = slot.nbytes
                readers[slot.name] = (*readers.get(slot.name, ()), stage.stage)
    shared = {name: (owner, *others) for stage in stages for name, owner, others in stage.tied}
    if not captured.trains:
        shared = {name: layers for name, layers in readers.items() if len(layers) > 1}
    return tuple(TiedBytes(name, sizes[name], layers) for name, layers in shared.items())


def _empty_s(crew: Crew) -> dict[str, float]:
    """Return, by member, the seconds of the smallest graph: the fixed part of every pass."""
    stage = probe_stage(0, 1, 4)
    arguments = {id: (stage, emulation) for id, emulation in crew.emulations.items()}
    taken = crew.call_each("hetpipe.profile.profiler:smallest", arguments)
    overheads_s = {}
    for member, times_s in taken.items():
        name = f"{member} ({crew.infos[member].id})"
        if isinstance(times_s, str):
            raise CostError(f"{name} cannot run the smallest graph: {times_s}; leave it out")
        samples = Samples.of(times_s)
        samples.check(f"{name}: the smallest graph")
        overheads_s[member] = samples.median_s
    return overheads_s


def _state_nbytes(stage: StageGraphs) -> int:
    if stage.update is None:
        return 0
    return sum(slot.nbytes for slot in stage.update.inputs if slot.role == "state")
