"""`hetpipe new-backend NAME`: writes a backend that runs as it is, as a package to install."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(help="Its name, the first part of its devices' ids.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where the package is written.", show_default="NAME")
    ] = None,
) -> None:
    """Write the skeleton of a backend: a package that is installed, tested and trained with."""
    from hetpipe.cli.output import Output
    from hetpipe.sdk.skeleton import write_skeleton

    package = folder or Path(name)
    output = Output(None)
    for path in write_skeleton(name, package):
        output.text(str(path))
    output.text(f"now: pip install -e {package} && hetpipe conform {name}")
