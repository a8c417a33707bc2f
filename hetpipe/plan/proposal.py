"""Proposals: pipelines that planners propose, without prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

from hetpipe.cost.table import CostTable
from hetpipe.errors import PlanError
from hetpipe.plan.plan import Plan
from hetpipe.schedule.generators import max_in_flight
from hetpipe.schedule.rule import rule_of
from hetpipe.schedule.turns import noam

Tables = Mapping[int, CostTable]  # costs by the samples of a micro-batch
Groups = tuple[tuple[str, ...], ...]  # the devices of the replicas of each stage
Cuts = tuple[int, ...]  # the first layer of every stage but the first


@dataclass(frozen=True)
class PlannerOptions:
    """The mini-batch, and the choices that a planner has. Raises `PlanError`.

    Asynchronous schedules are chosen only if `schedules` names them. `weights` is their policy for
    versions of the weights.
    """

    mini_batch: int
    microbatches: tuple[int, ...] = ()
    """Numbers of micro-batches to choose from; empty: powers of two whose sizes have costs."""
    schedules: tuple[str, ...] = ()
    """Schedules to choose from; empty: the planner's schedules, which flush."""
    weights: str = "auto"
    replicas: bool = True
    """Whether several devices may have the same stage."""
    recompute: bool = False
    """Whether stages may keep only their inputs, and repeat the forward before each backward."""
    free_order: bool = True
    """Whether stages may use the devices in an order other than the cluster's order."""
    channels: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Output channels of the layers that may be split between two stages."""

    def __post_init__(self) -> None:
        if self.mini_batch < 1:
            raise PlanError(f"a mini-batch of {self.mini_batch} samples; give 1 or more")
        for count in self.microbatches:
            if not 1 <= count <= self.mini_batch:
                raise PlanError(
                    f"a mini-batch of {self.mini_batch} cannot be {count} micro-batches; choose 1 "
                    f"to {self.mini_batch}"
                )
        for schedule in self.schedules:
            rule_of(schedule)

    def counts(self, tables: Tables) -> tuple[int, ...]:
        """Return the numbers of micro-batches to choose from, ascending. Raises `PlanError`."""
        if self.microbatches:
            return tuple(sorted(set(self.microbatches)))
        least, most = min(tables), max(tables)
        powers = (2**k for k in range(self.mini_batch.bit_length()))
        counts = [
            m
            for m in powers
            if least <= self.size(m) <= most and self.size(m) * (m - 1) < self.mini_batch
        ]
        if not counts:
            raise PlanError(
                f"costs are known for micro-batches of {least} to {most} samples, and no power of "
                f"two divides a mini-batch of {self.mini_batch} into such sizes: choose another "
                "mini-batch, or profile other sizes"
            )
        return tuple(counts)

    def among(self, own: Sequence[str]) -> tuple[str, ...]:
        """Return the schedules to choose from; `own` are the planner's schedules."""
        return self.schedules or tuple(own)

    @property
    def data_parallel(self) -> bool:
        """Whether a plan may have the whole model on several devices, under `data-parallel`."""
        return self.replicas and "data-parallel" in (self.schedules or ("data-parallel",))

    def size(self, microbatches: int) -> int:
        """Return the samples of the largest micro-batch, for this number of micro-batches."""
        return -(-self.mini_batch // microbatches)


@dataclass(frozen=True)
class Proposal:
    """A pipeline without prices: `groups` has, for each stage, the devices of its replicas."""

    cuts: Cuts
    groups: Groups
    schedule: str
    microbatches: int
    in_flight: tuple[int, ...] = ()  # by stage; empty: the schedule's number
    recompute: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        """All devices, in the order of the stages."""
        return tuple(device for group in self.groups for device in group)

    @property
    def depths(self) -> tuple[int, ...]:
        """The micro-batches in flight by stage: `in_flight`, or the schedule's numbers."""
        rule, replicas = rule_of(self.schedule), [len(group) for group in self.groups]
        if self.in_flight:
            return self.in_flight
        if rule.replicates:
            return (1,) * len(replicas)
        if not rule.flushes:
            return tuple(noam(replicas))
        workers = len(replicas) if max(replicas) > 1 else None
        return in_flight(self.schedule, len(replicas), self.microbatches, workers)

    def spans(self, layers: int) -> list[tuple[int, int]]:
        """Return the layers lo..hi (hi excluded) of each stage of a model."""
        return list(zip((0, *self.cuts), (*self.cuts, layers), strict=True))


def proposal_of(plan: Plan) -> Proposal:
    """Return the proposal that a plan prices."""
    groups = tuple(stage.devices for stage in plan.stages)
    return Proposal(
        plan.cuts, groups, plan.schedule, plan.microbatches, plan.in_flight, plan.recompute
    )


def nearest_table(tables: Tables, plan: Plan) -> CostTable:
    """Return the table whose micro-batch size is nearest to the plan's `share_samples`."""
    return tables[min(tables, key=lambda size: abs(size - plan.share_samples))]


@cache
def in_flight(
    schedule: str, stages: int, microbatches: int, workers: int | None = None
) -> tuple[int, ...]:
    """Return, by stage, the micro-batches that a schedule has in flight by default.

    `workers` is by default the number of stages over the rule's `stages_per_worker`.
    """
    rule = rule_of(schedule)
    if not rule.flushes:
        return tuple(noam([1] * stages))
    workers = workers or stages // rule.stages_per_worker
    return tuple(max_in_flight(rule.rows(stages, microbatches, workers=workers)))


def deep_in_flight(stages: int, microbatches: int) -> tuple[int, ...]:
    """Return, by stage, 2 (N - n) - 1 micro-batches in flight: DAPPLE's P_B, which hides
    transfers."""
    return tuple(min(2 * (stages - n) - 1, microbatches) for n in range(stages))


def groups_for(schedule: str, groups: Groups, microbatches: int) -> Groups:
    """Return the devices of each stage, from the devices of each worker.

    Under a schedule with several stages per worker, a group appears once for each stage. Groups
    that already repeat are returned unchanged. Raises `ScheduleError` if the schedule does not
    allow this number of micro-batches.
    """
    rule = rule_of(schedule)
    if not rule.several_stages or len(groups) > len(set(groups)):
        return groups
    stages = rule.stages_per_worker * len(groups)
    rows = rule.rows(stages, microbatches, workers=len(groups))
    places = {action.stage: row for row, actions in enumerate(rows) for action in actions}
    return tuple(groups[places[stage]] for stage in range(stages))


def single_device_groups(devices: Sequence[str]) -> Groups:
    """Return one group for each device."""
    return tuple((device,) for device in devices)
