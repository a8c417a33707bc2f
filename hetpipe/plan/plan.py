"""Plan: who does what, when, and what it should cost. Frozen, JSON both ways, prints as a table."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import pairwise, permutations
from typing import Any

from hetpipe.cost.table import CostTable, LinkCost
from hetpipe.errors import PlanError
from hetpipe.schedule.generators import generate
from hetpipe.schedule.rule import Rule, rule_of
from hetpipe.schedule.weights import WeightPolicy, policy_of
from hetpipe.sdk.info import HOST_MEMORY
from hetpipe.simulate.simulator import simulate
from hetpipe.simulate.times import FREE, StageTimes, Transfer

VERSION = 2

Tied = tuple[tuple[int, tuple[int, ...]], ...]
"""Stages that share parameters: (owner, the others)."""


@dataclass(frozen=True)
class StagePlan:
    """Layers lo..hi (hi excluded) on the devices of a stage's replicas."""

    lo: int
    hi: int
    devices: tuple[str, ...]
    in_flight: int  # forwards that may be waiting for their backward (K_n)
    forward_s: float  # one micro-batch, predicted
    backward_s: float
    update_s: float
    memory_nbytes: int  # predicted peak
    capacity_nbytes: int
    shares: tuple[float, ...] = ()  # in which replicas divide a micro-batch; empty: equal ones
    all_reduce_s: float = 0.0  # of the gradients of all replicas

    def __post_init__(self) -> None:
        if not self.shares:
            object.__setattr__(self, "shares", (1.0,) * len(self.devices))
        if len(self.shares) != len(self.devices) or min(self.shares) <= 0:
            raise PlanError(
                f"shares {list(self.shares)} for {len(self.devices)} replicas: give one above 0 "
                "for each"
            )


@dataclass(frozen=True)
class Plan:
    """A pipeline. Times are predicted from `label`led costs (measured, emulated or modelled)."""

    model: str
    layers: tuple[str, ...]  # names
    stages: tuple[StagePlan, ...]
    schedule: str
    mini_batch: int
    microbatches: int
    step_s: float  # predicted, one mini-batch
    cut_nbytes: tuple[int, ...]  # one per cut
    label: str
    origin: str  # which planner made it: balanced | data-parallel | even | speed-blind | ... | user
    notes: tuple[str, ...] = ()
    weights: str = "flush"  # how versions of the weights are kept

    def __post_init__(self) -> None:
        ends = [0, *(stage.hi for stage in self.stages)]
        starts = [stage.lo for stage in self.stages]
        if starts != ends[:-1] or ends[-1] != len(self.layers) or sorted(set(ends)) != ends:
            spans = ", ".join(f"{stage.lo}..{stage.hi}" for stage in self.stages)
            raise PlanError(
                f"stages {spans} do not cover layers 0..{len(self.layers)} one after the other"
            )
        if len(self.cut_nbytes) != len(self.stages) - 1:
            raise PlanError(
                f"{len(self.stages)} stages have {len(self.stages) - 1} cuts, "
                f"but cut_nbytes has {len(self.cut_nbytes)} entries"
            )

    @property
    def rule(self) -> Rule:
        """The rule of its schedule. Raises `ScheduleError` if nobody has registered it here."""
        return rule_of(self.schedule)

    @property
    def policy(self) -> WeightPolicy:
        """The policy by which versions of the weights are kept. Raises `ScheduleError`."""
        return policy_of(self.weights)

    @property
    def cuts(self) -> tuple[int, ...]:
        """First layer of every stage but the first."""
        return tuple(stage.lo for stage in self.stages[1:])

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage (its first replica)."""
        return tuple(stage.devices[0] for stage in self.stages)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The devices of all stages and their replicas, in order."""
        return tuple(device for stage in self.stages for device in stage.devices)

    @property
    def replicas(self) -> tuple[int, ...]:
        """How many devices each stage has."""
        return tuple(len(stage.devices) for stage in self.stages)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """K_n of each stage."""
        return tuple(stage.in_flight for stage in self.stages)

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput."""
        return self.mini_batch / self.step_s

    @property
    def fill_limit(self) -> float:
        """The share of the step that workers can be busy at best: M / (M + N - 1) for GPipe, 1F1B.

        For other schedules that of equal stages without transfers, where B = 2 F.
        """
        if not self.rule.flushes:
            return 1.0
        stages, workers = len(self.stages), len(set(self.devices))
        rows = generate(self.schedule, stages, self.microbatches, workers=workers)
        times = StageTimes((1.0,) * stages, (2.0,) * stages)
        shares = simulate(rows, times).busy_share()
        return sum(shares) / len(shares)

    @property
    def share_samples(self) -> int:
        """Samples of a micro-batch over the replicas of the first stage, rounded up."""
        return -(-self.mini_batch // (self.microbatches * len(self.stages[0].devices)))

    def tied(self, table: CostTable) -> Tied:
        """The stages that share parameters under these cuts; the owner is the lowest."""
        groups: set[tuple[int, ...]] = set()
        for shared in table.tied:
            groups.add(tuple(sorted({bisect_right(self.cuts, layer) for layer in shared.layers})))
        return tuple((group[0], group[1:]) for group in sorted(groups) if len(group) > 1)

    def stage_times(self, table: CostTable) -> StageTimes:
        """What a simulation needs, priced by `table`."""
        stages, devices = self.stages, self.devices
        ahead = [
            (here, there, int(share * nbytes))
            for here, there, nbytes, share in zip(
                devices, devices[1:], self.cut_nbytes, self._cut_shares(), strict=False
            )
        ]
        ahead_links = tuple(_transfer(table, here, there, nbytes) for here, there, nbytes in ahead)
        back_links = tuple(_transfer(table, there, here, nbytes) for here, there, nbytes in ahead)
        forward_s, backward_s, update_s = (
            [cost(d, s.lo, s.hi) for d, s in zip(devices, stages, strict=True)]
            for cost in (table.forward_s, table.backward_s, table.update_s)
        )
        for n, stage in enumerate(stages):
            if len(stage.devices) > 1:  # the slowest replica's, at its rows
                forward_s[n], backward_s[n] = stage.forward_s, stage.backward_s
                update_s[n] = stage.update_s
        gradient_links = [_gradient_link(table, stage) for stage in stages]
        if not self.rule.averages:
            for n, stage in enumerate(stages):
                update_s[n] += _copying_s(table, stage, gradient_links[n])
        for cut, (here, there, _) in enumerate(ahead):
            for n, device in ((cut, here), (cut + 1, there)):
                if _copies(table, device, table.link(here, there)):
                    forward_s[n] += sum(ahead_links[cut]) / 2
                    backward_s[n] += sum(back_links[cut]) / 2
        return StageTimes(
            tuple(forward_s),
            tuple(backward_s),
            tuple(update_s),
            ahead_links,
            back_links,
            self._tied_transfers(table),
            table.step_overhead_s,
            chunks=tuple(
                math.inf if table.devices[device].execution == "async" else 1.0
                for device in devices
            ),
            all_reduce_s=tuple(stage.all_reduce_s for stage in stages),
            gradient_links=tuple(gradient_links),
        )

    def _cut_shares(self) -> list[float]:
        """What each device moves of what crosses a cut, where replicas divide it (DAPPLE)."""
        if not self.rule.flushes:
            return [1.0] * len(self.cuts)
        return [max(1 / m, 1 / n) for m, n in pairwise(self.replicas)]

    def _tied_transfers(self, table: CostTable) -> dict[tuple[int, int], Transfer]:
        nbytes: dict[tuple[int, int], int] = {}
        for shared in table.tied:
            owner, *others = sorted({bisect_right(self.cuts, layer) for layer in shared.layers})
            for edge in [(owner, other) for other in others]:
                nbytes[edge] = nbytes.get(edge, 0) + shared.nbytes
        both = {**nbytes, **{(target, source): n for (source, target), n in nbytes.items()}}
        return {
            (source, target): _transfer(table, self.devices[source], self.devices[target], n)
            for (source, target), n in both.items()
        }

    def to_json(self) -> dict[str, Any]:
        """A dict that `json` can write."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`.

        Raises `PlanError` for another version, a key that is unknown, missing or of a wrong type.
        """
        if data.get("version") != VERSION:
            found = data.get("version")
            raise PlanError(f"the plan has version {found}, this hetpipe reads {VERSION}")
        plain = {key: value for key, value in data.items() if key != "version"}
        values = _checked(Plan, plain, "plan")
        values["stages"] = tuple(
            StagePlan(**_checked(StagePlan, stage, f"stage {index} of the plan"))
            for index, stage in enumerate(values["stages"])
        )
        return Plan(**values)

    def __str__(self) -> str:
        from hetpipe.plan.text import format_plan

        return format_plan(self)


def _copies(table: CostTable, device: str, link: LinkCost) -> bool:
    """Whether the cores that compute also copy what crosses the link: half of it at each end."""
    in_host = table.devices[device].memory_domain == HOST_MEMORY
    return in_host and link.label == "measured"


def _gradient_link(table: CostTable, stage: StagePlan) -> Transfer:
    """What it takes to send all gradients of a stage to another replica: the slowest way."""
    nbytes = sum(layer.params_nbytes for layer in table.layers[stage.lo : stage.hi])
    ways = permutations(stage.devices, 2)
    return max((_transfer(table, *way, nbytes) for way in ways), key=sum, default=FREE)


def _copying_s(table: CostTable, stage: StagePlan, link: Transfer) -> float:
    """What cores that compute copy for each update of a replica: of R it sends the gradients of
    one, R-1 times, and receives those of R-1."""
    count = len(stage.devices)
    ways = permutations(stage.devices, 2)
    copied = any(_copies(table, here, table.link(here, there)) for here, there in ways)
    return sum(link) * (count - 1) / count if copied else 0.0


def _transfer(table: CostTable, source: str, target: str, nbytes: int) -> Transfer:
    link = table.link(source, target)
    return Transfer(link.latency_s, nbytes / link.bandwidth_Bps)


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}


def _checked(record: Any, data: Any, name: str) -> dict[str, Any]:
    """The fields of a dataclass out of JSON: every key there, none unknown, types right."""
    if not isinstance(data, Mapping):
        raise PlanError(f"{name} is {data!r}, not an object")
    known = {entry.name: str(entry.type) for entry in fields(record)}
    for key in data:
        if key not in known:
            raise PlanError(f"{name} has an unknown key {key!r}; known: {', '.join(known)}")
    values: dict[str, Any] = {}
    for key, kind in known.items():
        if key not in data:
            raise PlanError(f"{name} lacks the key {key!r}")
        allowed = _KINDS.get(kind, (list, tuple))
        right = isinstance(data[key], allowed) and not isinstance(data[key], bool)
        if not right:
            raise PlanError(f"{name}: {key} is {data[key]!r}, it should be of type {kind}")
        values[key] = data[key] if kind in _KINDS else tuple(data[key])
    return values
