"""Options that the commands of studies share: plan, simulate, compare, whatif and capacity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import (
    MicrobatchesOption,
    PrecisionOption,
    check_picture,
    split_names,
)
from hetpipe.cli.output import Output
from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.files import check_target

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.plan.proposal import PlannerOptions
    from hetpipe.report.trace import Details
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.study.subject import Subject

ClusterNameOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="FILE|NAME",
        help="A cluster file, or a published cluster's name.",
        autocompletion=complete.cluster,
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", "--mini-batch", min=1, help="Samples per optimizer step."),
]


def _known_model(name: str | None) -> str | None:
    """Refuse an unknown model before any work."""
    from hetpipe.zoo.load import check_name

    if name is not None:
        check_name(name)
    return name


def _known_planner(name: str | None) -> str | None:
    """Refuse an unknown planner before any work."""
    from hetpipe.plan.planners.choice import check_planner

    if name is not None:
        check_planner(name)
    return name


def _known_schedules(names: str | None) -> str | None:
    """Refuse an unknown schedule before any work."""
    from hetpipe.schedule.rule import rule_of

    for name in split_names(names) or ():
        rule_of(name)
    return names


PlannerOption = Annotated[
    str | None,
    typer.Option(
        "--planner",
        metavar="NAME",
        callback=_known_planner,
        autocompletion=complete.planner,
        help="auto, bapipe, dapple, exact or pipedream.",
    ),
]
RecomputeOption = Annotated[
    bool,
    typer.Option("--recompute", help="Stages may repeat their forwards to save memory."),
]


ONE_MODEL = "a study needs one model: give either MODEL or --profile FILE"


@dataclass(frozen=True)
class SubjectOptions:
    """The options that name a model or a profile."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            callback=_known_model,
            help="A zoo name, or package.module:factory.",
            autocompletion=complete.model,
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            metavar="FILE",
            help="Costs instead of a model: PipeDream's graph.txt, Metis' or "
            "msr-fiddle's JSON, or the output of `hetpipe profile "
            "--json`.",
        ),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Samples in the micro-batches of the profile."),
    ] = None
    profiled_on: Annotated[
        str,
        typer.Option(
            "--profiled-on",
            metavar="BOARD",
            help="The board that was profiled.",
            autocompletion=complete.board,
        ),
    ] = "v100-pcie-16"
    cut_nbytes: Annotated[
        int | None,
        typer.Option(
            "--cut-nbytes",
            min=0,
            help="The bytes at every cut, if the profile does not contain them.",
        ),
    ] = None
    unit_s: Annotated[
        float,
        typer.Option(
            "--unit-s",
            metavar="SECONDS",
            help="Seconds in a JSON profile's unit of time, if the profile does not name the unit.",
        ),
    ] = 1e-3

    precision: PrecisionOption = None

    def __post_init__(self) -> None:
        if self.model is not None and self.profile is not None:
            raise HetpipeError(ONE_MODEL)
        if self.precision is not None and self.profile is not None:
            raise HetpipeError(
                f"--precision {self.precision} changes the passes of a model, and --profile "
                f"{self.profile} has only their times: leave out --precision"
            )

    def subject(self, global_batch: int | None) -> Subject:
        """Return the subject of the study. Raises `HetpipeError`."""
        from hetpipe.study.models import of_file, of_model

        if self.model is not None:
            return of_model(self.model, global_batch, self.precision).subject
        if self.profile is not None:
            return of_file(
                self.profile, self.samples, global_batch, self.profiled_on,
                cut_nbytes=self.cut_nbytes, unit_s=self.unit_s,
            )  # fmt: skip
        raise HetpipeError(ONE_MODEL)


@dataclass(frozen=True)
class PlannerChoices:
    """The options that limit the choices of a planner."""

    global_batch: GlobalBatchOption = None
    microbatches: MicrobatchesOption = None
    schedules: Annotated[
        str | None,
        typer.Option(
            "--schedules",
            metavar="LIST",
            callback=_known_schedules,
            autocompletion=complete.schedules,
            help="Schedules to choose from.",
        ),
    ] = None
    recompute: RecomputeOption = False

    def options(self, subject: Subject) -> PlannerOptions:
        """Return the options for a planner. Raises `HetpipeError`."""
        return subject.options(
            microbatches=(self.microbatches,) if self.microbatches else (),
            schedules=tuple(split_names(self.schedules) or ()),
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class DrawingOptions:
    """The options that name files for pictures and traces of simulated steps."""

    picture: Annotated[
        Path | None,
        typer.Option(
            "--picture", metavar="FILE", help="Draw the simulated steps: .png, .svg or .pdf."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="FILE", help="Write the simulated steps as JSON, for Perfetto."
        ),
    ] = None

    def check(self) -> None:
        """Raise `HetpipeError` unless the files can be written, the picture in its format."""
        check_picture(self.picture)
        check_target(self.trace)

    def draw(
        self,
        output: Output,
        timelines: Sequence[Timeline],
        title: str,
        details: Details | None = None,
    ) -> None:
        """Write the files. Raises `HetpipeError`."""
        from hetpipe.report.picture import draw_timelines
        from hetpipe.report.trace import write_trace

        if self.picture is not None:
            draw_timelines(self.picture, timelines, title)
        if self.trace is not None:
            write_trace(self.trace, timelines, details)
        for path in (self.picture, self.trace):
            if path is not None:
                output.text(f"written to {path}")


def cluster_from(name: str | None) -> Cluster:
    """Return the cluster of a file, or a published cluster. Raises `ClusterError`."""
    from hetpipe.cluster.cluster import load_or_published

    if name is None:
        raise ClusterError("no cluster: give --cluster with a file or a published cluster's name")
    return load_or_published(name)
