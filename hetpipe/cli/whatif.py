"""`hetpipe whatif`: predicts steps of a cluster with changed or removed devices, or other links."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output, progress_bar
from hetpipe.cli.study import (
    ClusterNameOption,
    PlannerChoices,
    PlannerOption,
    SubjectOptions,
    cluster_from,
)


def command(
    about: SubjectOptions,
    cluster: ClusterNameOption = None,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--change",
            metavar="CHANGE",
            help="-ID, +BOARD, +BOARD@SERVER, ID=BOARD, 'a~b=10 Gb/s, 5 us' or"
            " 'network=10 Gb/s, 5 us'. Repeatable; each change is planned"
            " separately. \\[default: remove each device]",
        ),
    ] = None,
    planner: PlannerOption = None,
    *,
    choices: PlannerChoices,
    json: JsonOption = None,
) -> None:
    """Show the step time after changes of a cluster."""
    from hetpipe.report.tables import Table, format_s
    from hetpipe.study.changes import changed, whatif

    output = Output(json)
    members = cluster_from(cluster)
    changes = change or [f"-{id}" for id in members.ids]
    for each in changes:  # refuse unknown names before the model is captured
        changed(members, each)
    subject = about.subject(choices.global_batch)
    options = choices.options(subject)
    with progress_bar("planning"):
        answer = whatif(subject, members, changes, options, planner or "auto")
    columns = ["change", "step", "of the step now", "devices", "stages", "schedule"]
    table = Table(f"{subject.name}, mini-batches of {subject.mini_batch}", columns, columns[1:5])
    for row in (answer.now, *answer.changes):
        if row.plan is None:
            table.add_row(row.change, "no plan")
            continue
        table.add_row(
            row.change or "as it is",
            f"{format_s(row.plan.step_s)} {row.plan.label}",
            f"{100 * (answer.factor(row) or 1):.1f} %",
            str(len(set(row.plan.all_devices))),
            str(len(row.plan.stages)),
            row.plan.schedule,
        )
    output.console.print(table)
    for row in (answer.now, *answer.changes):
        if row.why_not:
            output.text(f"{row.change or 'as it is'}: {row.why_not}")
    output.finish(answer.to_json())
