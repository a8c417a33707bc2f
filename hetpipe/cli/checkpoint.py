"""`hetpipe checkpoint`: lists checkpoints, and writes them in formats of other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output

app = typer.Typer(help="List checkpoints, and export them for other programs.")

FolderArgument = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="A folder of checkpoints.", show_default=False)
]


@app.command("list")
def list_checkpoints(folder: FolderArgument, json: JsonOption = None) -> None:
    """List the checkpoints in FOLDER, the newest first, and check every byte."""
    from hetpipe.checkpoint.series import survey
    from hetpipe.report.tables import Table
    from hetpipe.words import format_nbytes

    output = Output(json)
    table = Table("Checkpoints", ("step", "size", "state", "folder"), ("step", "size"))
    rows = []
    for row in survey(folder):
        step = "?" if row.step is None else str(row.step)
        table.add_row(step, format_nbytes(row.nbytes), row.fault or "valid", str(row.folder))
        rows.append(
            {
                "step": row.step, "nbytes": row.nbytes, "valid": not row.fault,
                "fault": row.fault, "folder": str(row.folder),
            }
        )  # fmt: skip
    output.console.print(table)
    output.finish({"checkpoints": rows})


@app.command()
def export(
    folder: FolderArgument,
    target: Annotated[
        Path,
        typer.Argument(
            metavar="TARGET", help="The new file, or folder for dcp.", show_default=False
        ),
    ],
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="pt (torch.save), safetensors, or dcp (torch.distributed.checkpoint). "
            "\\[default: by TARGET's name]",
        ),
    ] = None,
) -> None:
    """Write the model of the newest checkpoint in FOLDER to TARGET, for programs without hetpipe.

    dcp also has the optimizer's state, if torch has this optimizer. A line names the parts that it
    lacks.
    """
    from hetpipe.checkpoint.series import load
    from hetpipe.pipeline.torch_files import export as write
    from hetpipe.pipeline.torch_files import format_of

    form = format_of(target, format)
    Output(None).text(write(load(folder), target, form))
