"""`hetpipe reproduce PAPER [TABLE]`: shows a paper's tables beside our figures."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli import complete
from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output
from hetpipe.report.progress import progress_bar


def command(
    paper: Annotated[
        str,
        typer.Argument(
            metavar="PAPER",
            help="pipedream, dapple, bapipe or pipeoptim.",
            autocompletion=complete.paper,
        ),
    ],
    table: Annotated[
        str | None,
        typer.Argument(metavar="TABLE", help="One table; an unknown name lists all names."),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Compute a paper's tables with our planners and simulator, beside the paper's figures.

    HETPIPE_DATA names the folder of the published profiles and figures.
    """
    from hetpipe.papers.reproduced.table import check_names, data_folder, reproduce
    from hetpipe.report.tables import Table

    output = Output(json)
    check_names(paper, table)
    folder = data_folder()
    with progress_bar("planning"):
        tables = reproduce(paper, table, folder)
    for each in tables:
        shown = Table(
            f"{each.paper}, table {each.name}: {each.title}",
            ["figure", "paper", "ours (modelled)", "difference"],
        )
        for row in each.rows:
            shown.add_row(row.name, row.paper, row.ours, row.note)
        output.console.print(shown)
    output.finish({"tables": [each.to_json() for each in tables]})
