"""`hetpipe compare`: shows the plans of all planners for one cluster side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import JsonOption, split_names
from hetpipe.cli.output import Output
from hetpipe.cli.study import (
    ClusterNameOption,
    DrawingOptions,
    PlannerChoices,
    SubjectOptions,
    cluster_from,
)
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.report.tables import Table
    from hetpipe.simulate.timeline import Timeline
    from hetpipe.study.comparison import Comparison

DRAWN = 4  # number of plans in a picture, the quickest ones


def _known_planners(names: str | None) -> str | None:
    """Refuse an unknown planner before any work."""
    from hetpipe.plan.planners.choice import PLANNERS, check_planner
    from hetpipe.study.comparison import BY_HAND

    for name in split_names(names) or ():
        check_planner(name, (*PLANNERS, *BY_HAND))
    return names


def command(
    about: SubjectOptions,
    cluster: ClusterNameOption = None,
    planners: Annotated[
        str | None,
        typer.Option(
            "--planners",
            metavar="LIST",
            callback=_known_planners,
            help="Only these planners.",
            autocompletion=complete.planners,
        ),
    ] = None,
    *,
    choices: PlannerChoices,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure/--no-measure",
            help="Also run every plan of MODEL for some steps, if all devices are attached.",
        ),
    ] = True,
    drawing: DrawingOptions,
    json: JsonOption = None,
) -> None:
    """Compare the plans of all planners, and simple plans made by hand, in one simulator."""
    from hetpipe.plan.planners.choice import PLANNERS
    from hetpipe.study.accuracy import error_note
    from hetpipe.study.comparison import BY_HAND, compare

    output = Output(json)
    drawing.check()
    members = cluster_from(cluster)
    subject = about.subject(choices.global_batch)
    options = choices.options(subject)
    runs = measure and subject.measure is not None and not members.described
    with progress_bar("planning and measuring" if runs else "planning"):
        comparison = compare(
            subject,
            members,
            options,
            split_names(planners) or (*PLANNERS, *BY_HAND),
            measured=runs,
        )
    output.console.print(comparison_table(comparison))
    if note := error_note(subject, [members]):
        output.text(note)
    for row in comparison.rows:
        if row.why_not:
            output.text(f"{row.planner}: {row.why_not}")
    drawing.draw(output, timelines(comparison), f"{subject.name}, by planner")
    output.finish(comparison.to_json())


def timelines(comparison: Comparison) -> list[Timeline]:
    """Return the simulated steps of the quickest plans; each label begins with the planner."""
    from hetpipe.plan.pricing import predict

    return [
        replace(timeline, label=f"{row.planner}, {timeline.label}")
        for row in [row for row in comparison.rows if row.plan is not None][:DRAWN]
        for timeline in [predict(row.plan, row.costs)]  # type: ignore[arg-type]
    ]


def comparison_table(comparison: Comparison) -> Table:
    """Return a table with a row for each planner, the shortest predicted step first."""
    from hetpipe.report.tables import Table
    from hetpipe.words import format_nbytes, format_s

    columns = [
        "planner", "stages", "devices", "schedule", "M", "step", "samples/s", "of the sum",
        "above the bound", "peak memory", "measured",
    ]  # fmt: skip
    table = Table(
        f"{comparison.subject}, mini-batches of {comparison.mini_batch}", columns, columns[4:]
    )
    for row in comparison.rows:
        if row.plan is None:
            table.add_row(row.planner, "no plan")
            continue
        plan, gap, share = row.plan, row.plan.gap, comparison.share(row)
        table.add_row(
            row.planner,
            str(len(plan.stages)),
            str(len(set(plan.all_devices))),
            plan.schedule,
            str(plan.microbatches),
            f"{format_s(plan.step_s)} {plan.label}",
            f"{plan.samples_per_s:.1f}",
            f"{100 * (share or 0):.0f} %",
            "" if gap is None else f"{100 * gap:.0f} %",
            format_nbytes(max(stage.memory_nbytes for stage in plan.stages)),
            "" if row.measured_s is None else format_s(row.measured_s),
        )
    return table
