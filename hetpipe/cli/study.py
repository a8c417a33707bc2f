"""Options and output that the commands of studies share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.errors import ClusterError, HetpipeError

if TYPE_CHECKING:
    from hetpipe.cluster.cluster import Cluster
    from hetpipe.plan.proposal import PlannerOptions
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.study.subject import Subject

MaybeModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="[MODEL]", help="A zoo name, or package.module:factory."),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Costs instead of a model: PipeDream's graph.txt, Metis' or msr-fiddle's JSON, or "
        "what `hetpipe profile --json` wrote.",
    ),
]
SamplesOption = Annotated[
    int | None,
    typer.Option("--samples", min=1, help="The micro-batch at which a profile was measured."),
]
ProfiledOnOption = Annotated[
    str,
    typer.Option("--profiled-on", metavar="BOARD", help="The board of a published profile."),
]
CutBytesOption = Annotated[
    int | None,
    typer.Option(
        "--cut-nbytes", min=0, help="Of a profile that does not say it: the bytes at every cut."
    ),
]
UnitOption = Annotated[
    float,
    typer.Option(
        "--unit-s", metavar="SECONDS", help="Of a profile in JSON that does not say it: its unit."
    ),
]
ClusterNameOption = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="FILE|NAME", help="A cluster file, or a published cluster's name."
    ),
]
GlobalBatchOption = Annotated[
    int | None,
    typer.Option("--global-batch", "--mini-batch", min=1, help="Samples per optimizer step."),
]
PlannerOption = Annotated[
    str | None,
    typer.Option("--planner", metavar="NAME", help="auto, bapipe, dapple, exact or pipedream."),
]
RecomputeOption = Annotated[
    bool, typer.Option("--recompute", help="Stages may compute their forwards once more.")
]
SchedulesOption = Annotated[
    str | None,
    typer.Option("--schedules", metavar="LIST", help="Schedules to choose from."),
]
PictureOption = Annotated[
    Path | None,
    typer.Option("--picture", metavar="FILE", help="The simulated steps, .png, .svg or .pdf."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option("--trace", metavar="FILE", help="The same as Chrome's or Perfetto's JSON."),
]


def subject_from(
    model: str | None,
    profile: Path | None,
    samples: int | None,
    profiled_on: str,
    global_batch: int | None,
    *,
    cut_nbytes: int | None,
    unit_s: float,
) -> Subject:
    """Return the model or profile that the options name. Raises `HetpipeError`."""
    from hetpipe.study.models import of_file, of_model

    if (model is None) == (profile is None):
        raise HetpipeError("a study is of one model: give MODEL or --profile FILE, one of the two")
    if model is not None:
        return of_model(model, global_batch).subject
    assert profile is not None
    return of_file(
        profile, samples, global_batch, profiled_on, cut_nbytes=cut_nbytes, unit_s=unit_s
    )


def cluster_from(name: str | None) -> Cluster:
    """Return the cluster of a file or of a published name. Raises `ClusterError`."""
    from hetpipe.cluster.cluster import Cluster

    if name is None:
        raise ClusterError("no cluster: give --cluster a file, or the name of a published cluster")
    return Cluster.load(name) if Path(name).suffix else Cluster.published(name)


def options_from(
    subject: Subject, schedules: str | None, microbatches: int | None, recompute: bool
) -> PlannerOptions:
    """Return the options for a planner. Raises `HetpipeError`."""
    from hetpipe.cli.options import split_names

    return subject.options(
        microbatches=(microbatches,) if microbatches else (),
        schedules=tuple(split_names(schedules) or ()),
        recompute=recompute,
    )


def draw(
    timelines: Sequence[Timeline], picture: Path | None, trace: Path | None, title: str
) -> list[Path]:
    """Write the files that the options ask for. Raises `HetpipeError`."""
    from hetpipe.report.picture import draw_timelines
    from hetpipe.report.trace import write_trace

    if picture is not None:
        draw_timelines(picture, timelines, title)
    if trace is not None:
        write_trace(trace, timelines)
    return [path for path in (picture, trace) if path is not None]
