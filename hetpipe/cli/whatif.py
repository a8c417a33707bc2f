"""`hetpipe whatif`: predicts steps of a cluster with changed or removed devices, or other links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.cli.study import (
    ClusterNameOption,
    PlannerChoices,
    PlannerOption,
    SubjectOptions,
    cluster_from,
)
from hetpipe.errors import ClusterError
from hetpipe.report.progress import progress_bar

if TYPE_CHECKING:
    from hetpipe.study.changes import Alternative


MOST_REMOVALS = 256
"""Devices up to which each removal is planned without `--change`."""


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
    from hetpipe.report.tables import Table
    from hetpipe.study.accuracy import error_note
    from hetpipe.study.changes import changed, whatif
    from hetpipe.words import format_s

    output = Output(json)
    members = cluster_from(cluster)
    if not change and len(members.ids) > MOST_REMOVALS:
        raise ClusterError(
            f"the cluster has {len(members.ids)} devices, and hetpipe removes each of at most "
            f"{MOST_REMOVALS} by itself: name changes with --change"
        )
    changes = change or [f"-{id}" for id in members.ids]
    for each in changes:  # refuse unknown names before the model is captured
        changed(members, each)
    subject = about.subject(choices.global_batch)
    options = choices.options(subject)
    with progress_bar("planning"):
        answer = whatif(subject, members, changes, options, planner or "auto")
    rows = (answer.now, *answer.changes)
    numbers = ["step", "of the step now", "devices", "stages"]
    rates = list(dict.fromkeys(column for row in rows for column in _rates(row)))
    table = Table(
        f"{subject.name}, mini-batches of {subject.mini_batch}",
        ["change", *numbers, "schedule", *rates],
        [*numbers, *rates],
    )
    for row in rows:
        if row.plan is None:
            table.add_row(row.change or "as it is", "no plan")
            continue
        table.add_row(
            row.change or "as it is",
            f"{format_s(row.plan.step_s)} {row.plan.label}",
            f"{100 * (answer.factor(row) or 1):.1f} %",
            str(len(set(row.plan.all_devices))),
            str(len(row.plan.stages)),
            row.plan.schedule,
            *(_rates(row).get(column, "-") for column in rates),
        )
    output.console.print(table)
    if note := error_note(subject, (members, *(changed(members, each) for each in changes))):
        output.text(note)
    for row in rows:
        if row.why_not:
            output.text(f"{row.change or 'as it is'}: {row.why_not}")
    output.finish(answer.to_json())


def _rates(row: Alternative) -> dict[str, str]:
    """Return the throughput per watt and per price, by column; only what the boards state."""
    from hetpipe.words import format_rate

    rates = {}
    if (per_J := row.samples_per_J) is not None:
        rates["throughput per W"] = format_rate(per_J)
    if (per_price := row.samples_per_s_per_price) is not None:
        rates[f"throughput per 1000 {row.expense.currency}"] = format_rate(1000 * per_price)
    return rates
