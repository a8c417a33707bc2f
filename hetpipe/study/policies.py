"""Four policies against failures, with the assumptions that their costs rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from hetpipe.errors import HetpipeError
from hetpipe.plan.plan import Plan
from hetpipe.plan.survival import best_updates
from hetpipe.study.outage import Lost, Policy
from hetpipe.words import choices

LEAST_SHARE = 1e-9
"""The part of a stage's micro-batches below which the stage counts as lost."""
HETPIPE = "hetpipe: snapshots in memory, new plan"
DISK = "restart from the disk, new plan"
REROUTED = "rerouting (like ReCycle)"
REDUNDANT = "redundant computing (like Bamboo)"


def _assumed(value: float, meaning: str) -> Any:
    return field(default=value, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Assumptions:
    """Numbers that nobody measured. A study prints all of them."""

    host_share: float = _assumed(0.1, "share of failures that take a whole host, not one device")
    detect_s: float = _assumed(2.0, "from a failure until the training notices it")
    plan_s: float = _assumed(10.0, "planning for the remaining devices")
    load_s: float = _assumed(10.0, "giving changed stages to devices, with compilation")
    copy_Bps: float = _assumed(12e9, "from a device to its host's memory")
    network_Bps: float = _assumed(10e9, "from a host to another; the training waits for it")
    disk_Bps: float = _assumed(5e9, "all hosts together, to and from the disk")
    restart_s: float = _assumed(120.0, "ending and starting all processes, without reading")
    disk_every_s: float = _assumed(1800.0, "between checkpoints of policies that seldom need them")
    reroute_s: float = _assumed(1.0, "giving micro-batches to other replicas")
    bubble_use: float = _assumed(1.0, "share of idle time that rerouted micro-batches can use")
    redundancy: float = _assumed(0.2, "time that redundant computing adds to each step")
    takeover_s: float = _assumed(5.0, "until a neighbour takes the place of a lost device")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            positive = name.endswith("_Bps") or name == "disk_every_s"
            if not 0 <= value < math.inf or (positive and not value):
                least = "above 0" if positive else "of 0 or more"
                raise HetpipeError(f"{name} is {value}: give a finite number {least}")
            if name in ("host_share", "bubble_use") and value > 1:
                raise HetpipeError(f"{name} is {value}: give a share, from 0 to 1")

    def changed(self, values: Mapping[str, float]) -> Assumptions:
        """Return the assumptions with other values. Raises `HetpipeError`."""
        known = [each.name for each in fields(self)]
        for name in values:
            if name not in known:
                raise HetpipeError(f"no assumption {name!r}; {choices(name, known)}")
        return replace(self, **values)

    def rows(self) -> Iterator[tuple[str, float, str]]:
        """Yield the name, value and meaning of each assumption."""
        for each in fields(self):
            yield each.name, getattr(self, each.name), each.metadata["meaning"]


@dataclass(frozen=True)
class Trained:
    """A planned training: its plan, and its rates without some devices."""

    plan: Plan
    devices: tuple[str, ...]
    rates: tuple[float, ...]  # mini-batches per second, by the number of lost devices
    stage_nbytes: tuple[int, ...]  # parameters and optimizer state

    @property
    def pipelines(self) -> int:
        """The replicas of the stage with the fewest."""
        return min(self.plan.replicas)


def policies(trained: Trained, assumed: Assumptions, mtbf_s: float) -> list[Policy]:
    """Return the policies that the plan allows, at a mean time between failures."""
    copy_s, disk_s, move_s = copies_s(trained, assumed)
    step_s = trained.plan.step_s

    def updates(each_s: float) -> float:
        return best_updates(step_s, each_s, mtbf_s) if mtbf_s < math.inf else math.inf

    def planned(without: Lost) -> float:
        return trained.rates[np.count_nonzero(without)]

    seldom = max(1.0, assumed.disk_every_s // step_s) if mtbf_s < math.inf else math.inf
    again_s = assumed.detect_s + assumed.plan_s + assumed.load_s + move_s
    from_disk_s = assumed.detect_s + assumed.plan_s + assumed.restart_s + disk_s
    join_s = assumed.load_s + move_s
    made = [
        Policy(
            HETPIPE, planned, updates(copy_s), copy_s,
            again_s, again_s, join_s, True,
        ),
        Policy(
            DISK, planned, updates(disk_s), disk_s,
            from_disk_s, from_disk_s, from_disk_s - assumed.detect_s, True,
        ),
    ]  # fmt: skip
    if trained.pipelines > 1:
        made.append(
            Policy(
                REROUTED, _rerouted(trained, assumed), seldom, disk_s,
                assumed.detect_s + assumed.reroute_s, from_disk_s, join_s, False,
            )
        )  # fmt: skip
    if len(trained.plan.stages) > 1:
        made.append(
            Policy(
                REDUNDANT, _redundant(trained, assumed), seldom, disk_s,
                assumed.detect_s + assumed.takeover_s, from_disk_s, join_s, False,
            )
        )  # fmt: skip
    return made


def copies_s(trained: Trained, assumed: Assumptions) -> tuple[float, float, float]:
    """Return the seconds of a snapshot in another host's memory and of a checkpoint on the disk,
    and the seconds in which a device gets its stage from another host.

    All stages send at the same time, so the largest decides; one replica of each stage sends.
    """
    largest, total = max(trained.stage_nbytes), sum(trained.stage_nbytes)
    move_s = largest * (1 / assumed.copy_Bps + 1 / assumed.network_Bps)
    return move_s, total / assumed.disk_Bps, move_s


def _rerouted(trained: Trained, assumed: Assumptions) -> Callable[[Lost], float]:
    """Return the rate if the other replicas of a stage compute the micro-batches of lost ones.

    They first use the time in which the stage would be idle.
    """
    plan, stages = trained.plan, trained.plan.stages
    stage_of, share_of = np.full(len(trained.devices), len(stages)), np.zeros(len(trained.devices))
    numbers = {id: number for number, id in enumerate(trained.devices)}
    for stage_number, stage in enumerate(stages):
        at = [numbers[id] for id in stage.devices]
        stage_of[at] = stage_number
        share_of[at] = np.array(stage.shares) / sum(stage.shares)
    busy_s = np.array([plan.microbatches * (each.forward_s + each.backward_s) for each in stages])
    other_s = np.array([each.update_s + each.all_reduce_s for each in stages])
    usable_s = assumed.bubble_use * np.maximum(0.0, plan.step_s - busy_s - other_s)

    def rate(without: Lost) -> float:
        lost = np.bincount(stage_of[without], share_of[without], len(stages) + 1)[:-1]
        if lost.max() > 1 - LEAST_SHARE:
            return 0.0
        later_s = busy_s * lost / (1 - lost) - usable_s
        return float(1 / (plan.step_s + max(0.0, later_s.max())))

    return rate


def _redundant(trained: Trained, assumed: Assumptions) -> Callable[[Lost], float]:
    """Return the rate of as many whole pipelines as the remaining devices can form.

    Or all pipelines stay, and neighbours of lost devices compute two stages each, in twice the
    time. That ends if a device and its neighbour are both lost.
    """
    count, pipelines = len(trained.devices), trained.pipelines
    full_rate = 1 / (trained.plan.step_s * (1 + assumed.redundancy))
    numbers = {id: number for number, id in enumerate(trained.devices)}
    rows = [[numbers[id] for id in stage.devices] for stage in trained.plan.stages]
    pairs = [
        (device, after[place % len(after)])
        for row, after in zip(rows, [*rows[1:], rows[0]], strict=True)
        for place, device in enumerate(row)
    ]
    ones, others = np.array(pairs).T

    def rate(without: Lost) -> float:
        remaining = count - np.count_nonzero(without)
        whole = remaining * pipelines // count / pipelines
        covered = not (without[ones] & without[others]).any()
        return full_rate * max(whole, 0.5 * covered)

    return rate
