"""The cost of failures: planned trainings under four policies, with fewer and fewer devices."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.parts import without
from hetpipe.cluster.topology import Link, Server, Topology
from hetpipe.cost.board import board as find_board
from hetpipe.errors import ClusterError, PlanError
from hetpipe.plan.planners.choice import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions
from hetpipe.plan.survival import best_updates, daly_interval_s, young_interval_s
from hetpipe.study.outage import Failures, Run
from hetpipe.study.policies import Assumptions, Trained, copies_s, policies
from hetpipe.study.subject import Subject, costs_for, sizes_of

HOUR_S = 3600.0
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Plans are made without one device, and without these numbers of each 64 devices."""
PLANNER = "dapple"
"""The default planner: it is quick for many devices, and its stages have replicas."""


@dataclass(frozen=True)
class Trials:
    """How often a training is simulated, and for how long."""

    hours: float = 24.0
    repeats: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Goodput:
    """The useful mini-batches of a policy, as shares of the mini-batches without any failure."""

    policy: str
    per_hour: float  # failures of the cluster
    repair_s: float
    shares: tuple[float, ...]  # by repetition
    repeated: float  # mean shares of the time: for mini-batches that were lost
    copies: float
    pauses: float

    @property
    def mean(self) -> float:
        """The mean share."""
        return statistics.fmean(self.shares)

    @property
    def spread(self) -> float:
        """Half of the distance between the quartiles."""
        low, high = np.quantile(self.shares, (0.25, 0.75))
        return float(high - low) / 2

    @property
    def slower(self) -> float:
        """The mean share of the time that steps lose with fewer devices, or redundant computing."""
        return 1 - self.mean - self.repeated - self.copies - self.pauses


@dataclass(frozen=True)
class Interval:
    """The best distance of snapshots or checkpoints at a rate of failures."""

    per_hour: float
    copies: str  # "snapshots in memory" or "checkpoints on the disk"
    copy_s: float
    young_s: float
    daly_s: float
    updates: int


@dataclass(frozen=True)
class FailureStudy:
    """The cost of failures. All figures are modelled."""

    subject: str
    trained: Trained
    steps_s: Mapping[int, float | None]  # by the number of lost devices; None: no plan
    assumed: Assumptions
    trials: Trials
    intervals: tuple[Interval, ...]
    rows: tuple[Goodput, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {
            "subject": self.subject,
            "label": "modelled",
            "devices": len(self.trained.devices),
            "plan": self.trained.plan.to_json(),
            "steps_s": {str(lost): step_s for lost, step_s in self.steps_s.items()},
            "stage_nbytes": list(self.trained.stage_nbytes),
            "assumptions": asdict(self.assumed),
            "trials": asdict(self.trials),
            "intervals": [asdict(each) for each in self.intervals],
            "rows": [
                {**asdict(row), "mean": row.mean, "spread": row.spread, "slower": row.slower}
                for row in self.rows
            ],
        }


def failures(
    subject: Subject,
    cluster: Cluster,
    per_hour: Sequence[float],
    repair_s: Sequence[float],
    options: PlannerOptions | None = None,
    planner: str = PLANNER,
    *,
    assumed: Assumptions | None = None,
    trials: Trials | None = None,
) -> FailureStudy:
    """Return the cost of failures at these rates (of the whole cluster) and mean times of repair.

    Raises `HetpipeError` if there is no plan for the whole cluster.
    """
    assumed, trials = assumed or Assumptions(), trials or Trials()
    trained, steps_s = trained_on(subject, cluster, options, planner, trials.seed)
    numbers = {id: number for number, id in enumerate(cluster.ids)}
    hosts = [np.array([numbers[id] for id in group]) for group in cluster.groups()]
    horizon_s = trials.hours * HOUR_S
    rows = []
    for each_s in repair_s:
        for rate in per_hour:
            chance = Failures(rate / HOUR_S, each_s, assumed.host_share, hosts)
            drawn = [
                chance.events(horizon_s, trials.seed + number) for number in range(trials.repeats)
            ]
            for policy in policies(trained, assumed, chance.mtbf_s):
                spent = [Run(policy, chance).until(horizon_s, each) for each in drawn]
                whole = horizon_s * trained.rates[0]
                shares = tuple(each.mini_batches / whole for each in spent)
                parts = zip(*((s.repeated_s, s.copies_s, s.pauses_s) for s in spent), strict=True)
                means = (statistics.fmean(part) / horizon_s for part in parts)
                rows.append(Goodput(policy.name, rate, each_s, shares, *means))
    found = [each for rate in per_hour if rate for each in _intervals(trained, assumed, rate)]
    return FailureStudy(subject.name, trained, steps_s, assumed, trials, tuple(found), tuple(rows))


def _intervals(trained: Trained, assumed: Assumptions, per_hour: float) -> list[Interval]:
    mtbf_s, step_s = HOUR_S / per_hour, trained.plan.step_s
    memory_s, disk_s, _ = copies_s(trained, assumed)
    return [
        Interval(
            per_hour, copies, copy_s, young_interval_s(copy_s, mtbf_s),
            daly_interval_s(copy_s, mtbf_s), best_updates(step_s, copy_s, mtbf_s),
        )
        for copies, copy_s in (
            ("snapshots in memory", memory_s), ("checkpoints on the disk", disk_s),
        )
    ]  # fmt: skip


def trained_on(
    subject: Subject,
    cluster: Cluster,
    options: PlannerOptions | None = None,
    planner: str = PLANNER,
    seed: int = 0,
) -> tuple[Trained, dict[int, float | None]]:
    """Return the training on a cluster, and its planned steps by the number of lost devices.

    Some devices, drawn at random, are lost before each plan; between these numbers of devices the
    rates are interpolated. A rate is at least the rate of fewer devices, because a plan need not
    use all devices.
    """
    options = options or subject.options()
    tables = subject.costs(cluster, sizes_of(options.mini_batch))
    plan = planned(tables, cluster, options, planner)
    order = random.Random(seed).sample(cluster.ids, len(cluster.ids))
    count = len(order)
    steps_s: dict[int, float | None] = {0: plan.step_s}
    for lost in sorted({1, *(count * part // 64 for part in PARTS)} & set(range(1, count))):
        left = without(cluster, {*order[:lost]})
        try:
            steps_s[lost] = planned(tables, left, options, planner).step_s
        except PlanError:
            steps_s[lost] = None
    layers = costs_for(Priced(tables, options), plan).layers
    nbytes = tuple(
        sum(layer.params_nbytes + layer.state_nbytes for layer in layers[stage.lo : stage.hi])
        for stage in plan.stages
    )
    return Trained(plan, cluster.ids, rates(steps_s, count), nbytes), steps_s


def rates(steps_s: Mapping[int, float | None], count: int) -> tuple[float, ...]:
    """Return the mini-batches per second without 0 to `count` devices, from planned steps."""
    planned_rates = [1 / step_s if step_s else 0.0 for step_s in steps_s.values()]
    best = np.maximum.accumulate([*planned_rates, 0.0][::-1])[::-1]
    capped = np.minimum(best, planned_rates[0])
    return tuple(np.interp(range(count + 1), [*steps_s, count], capped).tolist())


def hosts_of_boards(
    counts: Mapping[str, float], per_host: int, inside: Link, network: Link
) -> Cluster:
    """Return a cluster of hosts with equal boards each, in a switched network.

    Raises `ClusterError` for impossible numbers, and `CostError` for an unknown board.
    """
    members: list[Member] = []
    for name, count in counts.items():
        if count < 1 or count % 1:
            raise ClusterError(f"{count:g} boards {name}: give a whole number of 1 or more")
        id = find_board(name).id
        members += [
            Member(f"{id}.{n}", "", board=id, server=f"{id}-host{n // per_host}")
            for n in range(int(count))
        ]
    servers = dict.fromkeys(member.server for member in members)
    return Cluster(
        tuple(members),
        servers=tuple(
            Server(name, Topology(inside.latency_s, inside.bandwidth_Bps)) for name in servers
        ),
        network=Topology(network.latency_s, network.bandwidth_Bps, "switch"),
    )
