"""`hetpipe new-backend NAME`: writes a working backend, in Python or in C."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

GROUP = "hetpipe.skeletons"  # entry points that write a skeleton, each named after a language


def command(
    name: Annotated[
        str, typer.Argument(help="The backend's name, the first part of its devices' ids.")
    ],
    c: Annotated[
        bool, typer.Option("--c", help="Write a library in C instead of a package in Python.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option(help="The folder to write.", show_default="NAME")
    ] = None,
) -> None:
    """Write the skeleton of a backend. It runs at once, and its README gives the next steps."""
    from importlib.metadata import entry_points

    from hetpipe.cli.output import Output
    from hetpipe.errors import HetpipeError

    language = "c" if c else "python"
    points = entry_points(group=GROUP, name=language)
    if not points:
        raise HetpipeError(f"no package has a skeleton in {language}; install hetpipe again")
    target = folder or Path(name)
    output = Output(None)
    for path in next(iter(points)).load()(name, target):
        output.text(str(path))
    output.text(f"now read {target / 'README.md'}")
