"""Options that are wrong by themselves are refused before anything is loaded or measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hetpipe.cli.options import split_numbers
from hetpipe.errors import HetpipeError, PlanError, ScheduleError


@dataclass(frozen=True)
class Wishes:
    """What options ask of a plan. `cuts` are layers, `replicas` numbers of devices."""

    schedule: str = "auto"
    weights: str = "auto"
    cuts: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    microbatches: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The keywords of `Pipeline`."""
        return asdict(self)

    def check_plan(self, path: Path, schedule: str, weights: str) -> None:
        """Raises `HetpipeError` for a plan file that cannot be run, or beside which more is asked.

        `schedule` and `weights` are the plan's.
        """
        asked = [f"--{name}" for name, value in self.options.items() if value not in (None, "auto")]
        if asked:
            raise HetpipeError(
                f"--plan {path} and {', '.join(asked)} are both given, and a plan says all of "
                "them: leave out one or the other"
            )
        check_names(schedule, weights)

    def check_devices(self, count: int) -> None:
        """Raises `PlanError` where a cluster of so many devices has too few for the stages."""
        if traits_of(self.schedule).shares_devices:
            return
        stages = len(self.cuts or ()) + 1
        need = sum(self.replicas) if self.replicas else stages
        if need > count:
            raise PlanError(
                f"{stages} stages need {need} devices, the cluster has {count}: give fewer cuts "
                "or replicas, or name more devices"
            )


def read_wishes(
    schedule: str,
    weights: str,
    cuts: str | None,
    replicas: str | None,
    microbatches: int | None,
    mini_batch: int | None,
) -> Wishes:
    """The options of a plan, checked as far as text can be.

    Raises `PlanError`, `ScheduleError` or `HetpipeError`.
    """
    check_names(schedule, weights)
    layers, devices = split_numbers(cuts, "--cuts"), split_numbers(replicas, "--replicas")
    _check_stages(schedule, layers, devices)
    if microbatches and mini_batch and microbatches > mini_batch:
        raise PlanError(
            f"--mini-batch {mini_batch} cannot be --microbatches {microbatches}: choose 1 to "
            f"{mini_batch} micro-batches"
        )
    return Wishes(
        schedule,
        weights,
        None if layers is None else tuple(layers),
        None if devices is None else tuple(devices),
        microbatches,
    )


@dataclass(frozen=True)
class Traits:
    """What options depend on in a schedule, and the weight policies that there are."""

    flushes: bool
    averages: bool  # replicas apply the mean of their gradients, not each mini-batch's by itself
    shares_devices: bool  # a device may have several stages
    policies: tuple[str, ...]  # that of schedules that flush is the first


def traits_of(schedule: str) -> Traits:
    """What is known of a schedule by its name. Raises `ScheduleError` for an unknown one."""
    from hetpipe.schedule.generators import averages, is_asynchronous, is_chunked, schedule_names
    from hetpipe.worker.weights import POLICIES

    if schedule not in ("auto", *schedule_names()):
        raise ScheduleError(f"no schedule {schedule!r}; known: auto, {', '.join(schedule_names())}")
    flushes = not is_asynchronous(schedule)
    return Traits(flushes, averages(schedule), is_chunked(schedule), POLICIES)


def check_names(schedule: str, weights: str) -> None:
    """Raises `ScheduleError`, `HetpipeError` for an unknown name, or two that do not fit."""
    traits = traits_of(schedule)
    flush, *others = traits.policies
    if weights == "auto":
        return
    if weights not in traits.policies:
        raise HetpipeError(
            f"no weight policy {weights!r}; known: auto, {', '.join(traits.policies)}"
        )
    if traits.flushes != (weights == flush):
        kind = "synchronous" if traits.flushes else "asynchronous"
        fitting = flush if traits.flushes else " or ".join(others)
        raise HetpipeError(
            f"schedule {schedule} is {kind} and weights {weights!r} do not fit it: choose "
            f"{fitting}, or another schedule"
        )
    if not traits.averages and weights != "stash":
        raise HetpipeError(
            f"under {schedule} a replica updates nothing between a forward and its backward, so "
            f"weights {weights!r} have nothing to choose from: use stash, the default"
        )


def check_synchronous(schedule: str) -> None:
    """Raises `HetpipeError` for a schedule that does not flush, or is unknown."""
    if not traits_of(schedule).flushes:
        raise HetpipeError(
            f"schedule {schedule} is asynchronous, and all rows of a benchmark train the same: "
            "choose a synchronous one, such as 1f1b"
        )


def check_picture(path: Path | None) -> None:
    """Raises `HetpipeError` for a picture that cannot be drawn."""
    from hetpipe.report.picture import FORMATS

    if path is not None and path.suffix not in FORMATS:
        raise HetpipeError(f"a picture is one of {', '.join(FORMATS)}, not {path.name!r}")


def _check_stages(
    schedule: str, cuts: Sequence[int] | None, replicas: Sequence[int] | None
) -> None:
    ends = [0, *(cuts or ())]
    if sorted(set(ends)) != ends:
        raise PlanError(
            f"--cuts {_listed(cuts)}: write the first layer of each stage but the first, ascending "
            "from 1"
        )
    if not traits_of(schedule).averages and len(ends) > 1:
        raise PlanError(
            f"{schedule} has 1 stage, the whole model on every replica, and --cuts {_listed(cuts)} "
            f"make {len(ends)}: leave them out, or use pipedream"
        )
    if replicas is None:
        return
    if min(replicas) < 1:
        raise PlanError(f"--replicas {_listed(replicas)}: each stage needs one device or more")
    if len(replicas) != len(ends):
        raise PlanError(
            f"--replicas {_listed(replicas)} are of {len(replicas)} stages, and {len(ends) - 1} "
            f"cuts make {len(ends)}: give one number per stage"
        )


def _listed(numbers: Sequence[int] | None) -> str:
    return ",".join(map(str, numbers or ()))
