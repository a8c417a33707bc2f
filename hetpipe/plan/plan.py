"""Plan: the layers, schedule and predicted costs of all stages."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Annotated, Any

from hetpipe.errors import PlanError
from hetpipe.html import lines_html, table_html
from hetpipe.records import Count, Entries, Number, Placed, Positive, Seconds, Source, Whole
from hetpipe.schedule.rule import Rule, rule_of
from hetpipe.schedule.weights import WeightPolicy, policy_of
from hetpipe.words import words


@dataclass(frozen=True)
class Split:
    """A linear layer or convolution that is split by output channels (BaPipe, section 3.3.2).

    The first part of `layer` computes its first `channels` output channels. The second part
    computes the other channels from the same input, and joins the results of both parts.
    """

    layer: str
    channels: Positive

    @property
    def layers(self) -> tuple[str, str]:
        """The names of the two parts."""
        return f"{self.layer}[:{self.channels}]", f"{self.layer}[{self.channels}:]"


def splits_of(channels: Mapping[str, int] | None) -> tuple[Split, ...]:
    """Return the splits; `channels` has, by layer name, the output channels of the first part.

    Raises `PlanError` for other values.
    """
    if channels is None:
        return ()
    if not isinstance(channels, Mapping):
        raise PlanError(f"split={channels!r}: give channels by layer, as {{'fc1': 96}}")
    for layer, count in channels.items():
        if not isinstance(layer, str) or type(count) is not int or count < 1:
            raise PlanError(
                f"split={{{layer!r}: {count!r}}}: give a layer's name and the output channels of "
                "its first part, a whole number of 1 or more"
            )
    return tuple(Split(layer, count) for layer, count in channels.items())


VERSION = 5
SINCE: dict[int, dict[str, Any]] = {
    2: {"interval_s": None},
    3: {"recompute": False, "lower_bound_s": None},
    4: {"splits": []},
}
"""Earlier versions that can be read. The entry of a version has fields, with defaults, that plans
of this version and of all versions before it lack."""
MOST_MICROBATCHES = 2**16
MOST_IN_FLIGHT = 2**10  # a stage may have more only if the plan has more micro-batches

HEADER = ("stage", "layers", "device", "forward ms", "backward ms", "in flight", "memory MiB")
MIB = 2**20

Share = Annotated[float, Number(most=1e9, above=True)]


@dataclass(frozen=True)
class StagePlan:
    """Layers lo..hi (hi excluded) on the devices of a stage's replicas."""

    lo: Count
    hi: Count
    devices: Annotated[tuple[str, ...], Entries(1)]
    in_flight: Positive  # forwards that may be waiting for their backward (K_n)
    forward_s: Seconds  # one micro-batch, predicted
    backward_s: Seconds
    update_s: Seconds
    memory_nbytes: Count  # predicted peak
    capacity_nbytes: Count
    shares: tuple[Share, ...] = ()  # of a micro-batch, by replica; empty: equal shares
    all_reduce_s: Seconds = 0.0  # sum of all replicas' gradients

    def __post_init__(self) -> None:
        if not self.devices:
            raise PlanError("no device; a stage needs one or more")
        if not self.shares:
            object.__setattr__(self, "shares", (1.0,) * len(self.devices))
        if len(self.shares) != len(self.devices) or min(self.shares) <= 0:
            raise PlanError(
                f"shares [{words(map(str, self.shares))}] for {len(self.devices)} replicas: give a "
                "share above 0 for each"
            )


@dataclass(frozen=True)
class Plan:
    """A pipeline. `label` says whether its costs are measured, emulated or modelled."""

    model: str
    layers: Annotated[tuple[str, ...], Entries(1)]  # names
    stages: Annotated[tuple[Annotated[StagePlan, Placed()], ...], Entries(1)]
    schedule: str
    mini_batch: Positive
    microbatches: Annotated[int, Whole(1, MOST_MICROBATCHES)]
    step_s: Seconds  # predicted, for one mini-batch
    cut_nbytes: tuple[Count, ...]  # one per cut
    label: str
    origin: str  # which planner made it: balanced | data-parallel | even | speed-blind | ... | user
    notes: tuple[str, ...] = ()
    weights: str = "flush"  # how versions of the weights are kept
    interval_s: tuple[Seconds, Seconds] | None = None  # predicted: holds four of five steps
    recompute: bool = False  # whether stages keep only their inputs for the backward
    lower_bound_s: Seconds | None = None  # no plan on these devices has a shorter step
    splits: tuple[Annotated[Split, Placed()], ...] = ()  # `layers` has the names of both parts

    def __post_init__(self) -> None:
        if self.microbatches > self.mini_batch:
            raise PlanError(
                f"microbatches is {self.microbatches}, more than the {self.mini_batch} samples of "
                "mini_batch: give as many or fewer"
            )
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
        self._check_splits()
        for number, stage in enumerate(self.stages):
            most = max(self.microbatches, MOST_IN_FLIGHT)
            if stage.in_flight > most:
                raise PlanError(
                    f"stages.{number}.in_flight is {stage.in_flight}, above {most}: give less"
                )

    def _check_splits(self) -> None:
        """Raise `PlanError` unless the layers contain the parts of every split, side by side."""
        neighbours = set(itertools.pairwise(self.layers))
        for split in self.splits:
            if split.layers not in neighbours:
                first, second = split.layers
                raise PlanError(
                    f"splits: {split.layer} is split after {split.channels} channels, but the "
                    f"plan's {len(self.layers)} layers have no neighbours {first} and {second}: "
                    "make the plan for the model with its splits"
                )

    @property
    def rule(self) -> Rule:
        """The rule of the schedule. Raises `ScheduleError` for an unregistered schedule."""
        return rule_of(self.schedule)

    @property
    def policy(self) -> WeightPolicy:
        """The policy for versions of the weights. Raises `ScheduleError` for an unknown policy."""
        return policy_of(self.weights)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """The first layer of every stage but the first."""
        return tuple([stage.lo for stage in self.stages[1:]])

    @cached_property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage (its first replica)."""
        return tuple([stage.devices[0] for stage in self.stages])

    @cached_property
    def all_devices(self) -> tuple[str, ...]:
        """The devices of all stages and their replicas, in order."""
        return tuple([device for stage in self.stages for device in stage.devices])

    @cached_property
    def replicas(self) -> tuple[int, ...]:
        """The number of devices of each stage."""
        return tuple([len(stage.devices) for stage in self.stages])

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """The forwards of each stage that may be waiting for their backward (K_n)."""
        return tuple([stage.in_flight for stage in self.stages])

    @property
    def is_priced(self) -> bool:
        """Whether times and memory are predicted, not unknown."""
        return self.step_s > 0

    @property
    def samples_per_s(self) -> float:
        """Predicted throughput; infinite if the plan is not priced."""
        return self.mini_batch / self.step_s if self.step_s else math.inf

    @property
    def gap(self) -> float | None:
        """The most by which this plan's step can exceed the best plan's step, relative to the lower
        bound; None without a lower bound."""
        return self.step_s / self.lower_bound_s - 1 if self.lower_bound_s else None

    @property
    def fill_limit(self) -> float:
        """The largest share of the step in which workers compute; 1 without flushes.

        It is simulated with equal stages, backwards as long as two forwards, and no transfers. For
        1F1B and GPipe with M micro-batches and N stages it is M / (M + N - 1).
        """
        from hetpipe.schedule.generators import generate
        from hetpipe.simulate.simulator import simulate
        from hetpipe.simulate.times import StageTimes

        if not self.rule.flushes:
            return 1.0
        stages, workers = len(self.stages), len(set(self.devices))
        rows = generate(self.rule, stages, self.microbatches, workers=workers)
        times = StageTimes((1.0,) * stages, (2.0,) * stages)
        shares = simulate(rows, times).busy_share()
        return sum(shares) / len(shares)

    @property
    def share_samples(self) -> int:
        """The samples of a micro-batch divided by the replicas of the first stage, rounded up."""
        return -(-self.mini_batch // (self.microbatches * len(self.stages[0].devices)))

    def to_json(self) -> dict[str, Any]:
        """Return a dict that `json` can write."""
        return {"version": VERSION, **asdict(self)}

    @staticmethod
    def from_json(data: Mapping[str, Any], where: str = "") -> Plan:
        """Return the plan of a dict from `to_json`; `where` is the file that contained it.

        Raises `PlanError` for an unknown version, and for a wrong entry, with the entry's place.
        """
        return Source("the plan", PlanError, where).versioned(Plan, _upgraded(data), VERSION)

    def __str__(self) -> str:
        return format_plan(self)

    def _repr_html_(self) -> str:
        rows = [_row(self, index, stage) for index, stage in enumerate(self.stages)]
        return table_html(f"Plan of {self.model}", HEADER, rows, HEADER[3:]) + lines_html(
            _sentences(self)
        )


def _upgraded(data: Any) -> Any:
    """Return data of an earlier version with the fields of this version; other data unchanged."""
    version = data.get("version") if isinstance(data, Mapping) else None
    if type(version) is not int or version not in SINCE:
        return data
    later = [fields for since, fields in SINCE.items() if since >= version]
    return {**data, **{name: value for each in later for name, value in each.items()},
            "version": VERSION}  # fmt: skip


def format_plan(plan: Plan) -> str:
    """Return a text with a row for each stage, then the schedule, the prediction and the origin."""
    rows = [HEADER, *(_row(plan, index, stage) for index, stage in enumerate(plan.stages))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *_sentences(plan)])


def _sentences(plan: Plan) -> list[str]:
    """Return the schedule, the prediction and the origin, and the notes."""
    step = "step unknown"
    if plan.is_priced:
        step = (
            f"step {1e3 * plan.step_s:.2f} ms{_interval(plan)}, {plan.samples_per_s:.1f} samples/s"
            f"{_bound(plan)}"
        )
    line = (
        f"{plan.schedule}, {plan.microbatches} micro-batches of a mini-batch of {plan.mini_batch}: "
        f"{step}, fill limit {100 * plan.fill_limit:.0f} %, "
        f"{f'{plan.label} costs' if plan.is_priced else 'no costs'}, {plan.origin} plan"
    )
    return [line, *(f"note: {note}" for note in plan.notes)]


def _interval(plan: Plan) -> str:
    if plan.interval_s is None:
        return ""
    low_s, high_s = plan.interval_s
    return f" ({1e3 * low_s:.2f} .. {1e3 * high_s:.2f})"


def _bound(plan: Plan) -> str:
    if plan.lower_bound_s is None or plan.gap is None:
        return ""
    return f" (no plan below {1e3 * plan.lower_bound_s:.2f} ms: {100 * plan.gap:.0f} % above)"


MOST_NAMED = 16
"""Most devices of a stage that a printed plan names."""


def _named(devices: Sequence[str]) -> str:
    """Return the names of a stage's devices; of many devices the first and the last one."""
    if len(devices) <= MOST_NAMED:
        return ", ".join(devices)
    return f"{devices[0]} .. {devices[-1]}, {len(devices)} in all"


def _row(plan: Plan, index: int, stage: StagePlan) -> tuple[str, ...]:
    priced = plan.is_priced
    first, last = plan.layers[stage.lo], plan.layers[stage.hi - 1]
    return (
        str(index),
        f"{stage.lo}-{stage.hi - 1} {first}" + (f" .. {last}" if last != first else ""),
        _named(stage.devices),
        f"{1e3 * stage.forward_s:.2f}" if priced else "?",
        f"{1e3 * stage.backward_s:.2f}" if priced else "?",
        str(stage.in_flight),
        f"{stage.memory_nbytes / MIB:.1f} / {stage.capacity_nbytes / MIB:.0f}" if priced else "?",
    )
