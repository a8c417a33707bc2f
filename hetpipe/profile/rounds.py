"""Rounds: all devices of a crew measure the patterns of a network at the same time.

A slice consists of some rounds of every worker, and then a probe. A round has all sizes of
micro-batches in turn, and all devices continue until the slowest has ended its round. So a
disturbance affects all sizes and devices. Later rounds skip a pattern whose median is known
precisely. A profile has two halves, some time apart, and each half measures everything. If other
work disturbed one half, only the other half counts. If it disturbed both halves, only the less
disturbed half counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from hetpipe.cost.probe import Probe
from hetpipe.crew.crew import Crew
from hetpipe.profile import contention
from hetpipe.profile.estimate import Series
from hetpipe.profile.patterns import Network
from hetpipe.profile.probing import Probes, median_probe
from hetpipe.profile.profiler import Prepared, Times

LEAST = 3  # least slices in a half
MOST = 50  # most rounds in a slice
SLICE_S = 0.1
HALF_S = 0.3  # least seconds of a half, because the system counts core time in steps of 0.01 s
BUDGET_S = 0.6  # most seconds of a half, per size; but at least `LEAST` slices are run
UPDATES = 2  # least number of updates
ALONE = 2  # rounds of a device alone, after a half

WORKER = "hetpipe.profile.profiler"


@dataclass(frozen=True)
class Effort:
    """The effort of a profile, over all devices."""

    layers: int
    patterns: int
    compilations: int
    runs: int
    measured_s: float


@dataclass
class _Half:
    """The slices of a half, and the share of the cores that other work used during it."""

    measured: dict[str, list[Times]]
    probes: dict[str, list[Probe]] = field(default_factory=dict)
    foreign: float = 0.0


class Rounds:
    """Measures a network on all members of a crew.

    `networks` yields, for each backend, its members and the network in the operators of this
    backend. The members of one backend compile while the network of the next backend is traced.
    """

    def __init__(
        self,
        crew: Crew,
        networks: Iterable[tuple[Sequence[str], Network]],
        sizes: Sequence[int],
        half_s: float = HALF_S,
    ) -> None:
        self._crew = crew
        self._half_s = half_s
        self._sizes = list(sizes)
        self._begin_s = time.perf_counter()
        emulations = crew.emulations
        begun: list[Callable[[], dict[str, Prepared]]] = []
        network_of: dict[str, Network] = {}
        for members, network in networks:
            arguments = {id: (network, self._sizes, emulations[id]) for id in members}
            begun.append(crew.begin_each(f"{WORKER}:prepare", arguments))
            network_of |= dict.fromkeys(members, network)
        self._members = [id for id in emulations if id in network_of]
        self._networks = {id: network_of[id] for id in self._members}
        self._prepared: dict[str, Prepared] = {}
        for results in begun:
            self._prepared |= results()
        self._halves: list[_Half] = []
        self._alone: dict[str, list[Times]] = {member: [] for member in self._members}
        self._alone_probes: dict[str, list[Probe]] = {member: [] for member in self._members}
        self._updates: dict[str, tuple[Times, Times]] = {}
        self._able = {member: list(self._series(member, ()).able) for member in self._members}
        self._slice_s = SLICE_S  # seconds; after each slice, set by `_slowest_s`

    def half(self, probes: Probes) -> float:
        """Measure until all medians are precise or the budget is spent.

        Returns the share of the cores that other work used.
        """
        half = _Half({member: [] for member in self._members})
        self._halves.append(half)
        before = self._usage()
        begin_s = time.perf_counter()
        while True:
            active = {member: self._uncertain(member, half) for member in self._members}
            spent_s = time.perf_counter() - begin_s
            if self._is_enough(half, any(active.values()), spent_s):
                break
            latest = self._slice(
                {member: own or self._everything(member) for member, own in active.items()},
                self._slice_s,
                MOST,
            )
            for member, measured in latest.items():
                half.measured[member].append(measured)
            for member, probe in probes.together().items():
                half.probes.setdefault(member, []).append(probe)
            self._slice_s = self._slowest_s(latest)
        half.foreign = contention.foreign_share(before, self._usage())
        self._measure_alone(probes)
        return half.foreign

    def finish(self) -> dict[str, Series]:
        """Measure updates, free the workers' programs, and return by member the rounds that count.

        Raises `CostError` if times are not credible.
        """
        size = min(self._sizes)
        measured = self._crew.call(self._members, f"{WORKER}:updates", size, UPDATES, self._half_s)
        self._updates = dict(zip(self._members, measured, strict=True))
        self._crew.call(self._members, f"{WORKER}:release")
        series = {member: self._series(member, self._counting) for member in self._members}
        for own in series.values():
            own.check(self._sizes)
        return series

    @property
    def foreign(self) -> float:
        """The share of the cores that other work used during the rounds that count."""
        return max(half.foreign for half in self._counting)

    @property
    def effort(self) -> Effort:
        """The effort so far."""
        network = self._networks[self._members[0]]
        slices = (own for half in self._halves for own in half.measured.values())
        measured = chain(*slices, *self._alone.values(), *self._updates.values())
        return Effort(
            len(network.layers),
            len(network.patterns),
            sum(prepared.compilations for prepared in self._prepared.values()),
            sum(prepared.runs for prepared in self._prepared.values())
            + sum(one.runs for one in measured),
            time.perf_counter() - self._begin_s,
        )

    def probes(self, member: str) -> tuple[Probe | None, Probe | None]:
        """Return the probes of a member beside the others, and alone; None for a missing probe."""
        beside = [probe for half in self._counting for probe in half.probes.get(member, [])]
        alone = self._alone_probes[member]
        series = self._series(member, self._counting)
        return (
            series.usual_probe(beside, self._sizes) if beside else None,
            median_probe(alone) if alone else None,
        )

    @property
    def alone_size(self) -> int:
        """The size at which devices were measured alone."""
        return min(self._sizes)

    @property
    def _counting(self) -> list[_Half]:
        quiet = [half for half in self._halves if half.foreign <= contention.LIMIT]
        return quiet or [min(self._halves, key=lambda half: half.foreign)]

    def _series(self, member: str, halves: Sequence[_Half]) -> Series:
        return Series(
            f"{member} ({self._crew.infos[member].id})",
            self._networks[member],
            self._prepared[member].refused,
            [measured for half in halves for measured in half.measured[member]],
            self._alone[member],
            self._updates.get(member, (Times(), Times())),
        )

    def _everything(self, member: str) -> dict[int, list[int]]:
        return dict.fromkeys(self._sizes, self._able[member])

    def _uncertain(self, member: str, half: _Half) -> dict[int, list[int]]:
        """Return the patterns to measure again, by size; a size without such patterns is absent."""
        series = self._series(member, [half])
        uncertain = {size: series.uncertain(size) for size in self._sizes}
        return {size: patterns for size, patterns in uncertain.items() if patterns}

    def _is_enough(self, half: _Half, uncertain: bool, spent_s: float) -> bool:
        slices = len(half.measured[self._members[0]])
        if slices < LEAST or spent_s < self._half_s:
            return False
        return not uncertain or spent_s >= BUDGET_S * len(self._sizes)

    def _slice(
        self, active: Mapping[str, Mapping[int, Sequence[int]]], least_s: float, most: int
    ) -> dict[str, Times]:
        arguments = {member: (own, least_s, most) for member, own in active.items()}
        return self._crew.call_each(f"{WORKER}:rounds", arguments)

    def _slowest_s(self, latest: Mapping[str, Times]) -> float:
        """Return the least seconds of a slice in which the slowest device ends a round."""
        return max(SLICE_S, *(min(measured.rounds_s) for measured in latest.values()))

    def _measure_alone(self, probes: Probes) -> None:
        """Run some rounds of each device while the others are idle, at the smallest size."""
        if len(self._members) == 1:
            return
        for member in self._members:
            active = {member: {self.alone_size: self._able[member]}}
            self._alone[member].append(self._slice(active, 0.0, ALONE)[member])
            if (probe := probes.alone(member)) is not None:
                self._alone_probes[member].append(probe)

    def _usage(self) -> list[contention.Usage]:
        return self._crew.call(self._members, "hetpipe.profile.contention:usage")
