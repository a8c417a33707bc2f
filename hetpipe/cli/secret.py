"""`hetpipe secret`: write the secret that the hosts of a cluster share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    file: Annotated[Path, typer.Argument(help="The new file.", show_default=False)],
) -> None:
    """Write a new secret for the hosts of a cluster to FILE.

    Copy the file to each host over a safe channel such as ssh, and let HETPIPE_SECRET_FILE name it.
    Whoever has the secret can run programs on all these hosts.
    """
    from hetpipe.hosts.secret import FILE, write_secret

    write_secret(file)
    typer.echo(f"wrote {file}; on each host: export {FILE}={file.absolute()}")
