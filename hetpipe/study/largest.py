"""The largest model, or the largest micro-batch, for which a cluster has enough memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetpipe.cluster.cluster import Cluster
from hetpipe.cost.between import at_size
from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.costs import StageCosts
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, in_flight, single_device_groups
from hetpipe.plan.search import best_cuts
from hetpipe.schedule.rule import rule_of
from hetpipe.study.subject import Subject, sizes_of

MOST = 2**20
"""The search for the most repetitions or samples ends at this number."""


@dataclass(frozen=True)
class Method:
    """A way to train: a schedule, its policy of weights, and whether stages recompute."""

    schedule: str
    weights: str = "auto"
    recompute: bool = False

    def __str__(self) -> str:
        weights = "" if self.weights == "auto" else f", {self.weights}"
        return self.schedule + weights + (", recompute" if self.recompute else "")


METHODS = (
    Method("data-parallel"),
    Method("gpipe"),
    Method("gpipe", recompute=True),
    Method("1f1b"),
    Method("1f1b", recompute=True),
    Method("pipedream", "stash"),
    Method("pipedream", "2bw"),
    Method("pipedream", "pipeoptim"),
)


@dataclass(frozen=True)
class Capacity:
    """The largest counts by method, on the first 1, 2, 4, ... members; 0 if not even 1 fits.

    `devices` has these numbers of members.
    """

    subject: str
    counted: str  # "repetitions of layers 2..9", "samples of a micro-batch"
    devices: tuple[int, ...]
    largest: Mapping[Method, tuple[int, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {
            "subject": self.subject,
            "counted": self.counted,
            "devices": list(self.devices),
            "rows": [
                {"method": str(method), "largest": list(counts)}
                for method, counts in self.largest.items()
            ],
        }


def capacity(
    subject: Subject,
    cluster: Cluster,
    microbatches: int | None = None,
    block: tuple[int, int] | None = None,
    methods: Sequence[Method] = METHODS,
) -> Capacity:
    """Return the largest model or micro-batch that fits on 1, 2, 4, ... and on all devices.

    With a block of layers (first, last), the result counts repetitions of the block in the model;
    without a block, the samples of a micro-batch. Each device has one stage, with the best cuts;
    under `data-parallel` each device has the whole model. A mini-batch has `microbatches`
    micro-batches, by default two for each stage. Raises `PlanError` if the model lacks the block.
    """
    tables = subject.costs(cluster, sizes_of(subject.mini_batch))
    layers = len(next(iter(tables.values())).layers)
    if block is not None and not 0 <= block[0] <= block[1] < layers:
        raise PlanError(
            f"block {block[0]}..{block[1]}: the model has layers 0..{layers - 1}; give the numbers "
            "of a first and a last layer"
        )
    whole = len(cluster.ids)
    counts = tuple(sorted({*(2**k for k in range(whole.bit_length())), whole}))

    def largest(method: Method, count: int) -> int:
        stages = 1 if rule_of(method.schedule).replicates else count
        members, parts = cluster.ids[:count], microbatches or 2 * stages
        if block is None:
            return most(lambda size: fits(at_size(tables, size), members, method, parts))
        size = min(tables, key=lambda size: abs(size - subject.mini_batch // parts))
        table = tables[size]
        return most(lambda n: fits(repeated(table, *block, n), members, method, parts))

    return Capacity(
        subject.name,
        "samples of a micro-batch"
        if block is None
        else f"repetitions of layers {block[0]}..{block[1]}",
        counts,
        {method: tuple(largest(method, count) for count in counts) for method in methods},
    )


def repeated(table: CostTable, first: int, last: int, times: int) -> CostTable:
    """Return the table of a model with layers first..last `times` times in a row, and no ties."""

    def again(entries: Sequence[Any]) -> tuple[Any, ...]:
        block = tuple(entries[first : last + 1])
        return (*entries[:first], *block * times, *entries[last + 1 :])

    devices = {id: replace(cost, layers=again(cost.layers)) for id, cost in table.devices.items()}
    return replace(table, layers=again(table.layers), devices=devices, tied=())


def fits(
    table: CostTable,
    members: Sequence[str],
    method: Method,
    microbatches: int,
    cuts: tuple[int, ...] | None = None,
) -> bool:
    """Return whether every stage has enough memory, with these cuts or (None) the best cuts."""
    if rule_of(method.schedule).replicates:
        costs = StageCosts(table, method.recompute)
        need = costs.memory_nbytes(0, costs.count, 1)
        return all(need <= table.devices[member].memory_nbytes for member in members)
    if not rule_of(method.schedule).flushes:
        microbatches = 1
    depths = in_flight(method.schedule, len(members), microbatches)
    options = PlannerOptions(table.samples * microbatches, (microbatches,), weights=method.weights)
    priced = Priced({table.samples: table}, options)
    groups = single_device_groups(members)
    bare = Proposal((), groups, method.schedule, microbatches, depths, method.recompute)
    tried = best_cuts(priced, bare) if cuts is None else [cuts]
    return any(not priced.why_not(replace(bare, cuts=each)) for each in tried)


def most(holds: Callable[[int], bool]) -> int:
    """Return the largest n such that `holds` is true for 1 to n, at most `MOST`; 0 if it is false
    for 1."""
    if not holds(1):
        return 0
    low = 1
    while low < MOST and holds(2 * low):
        low *= 2
    if low >= MOST:
        return MOST
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
