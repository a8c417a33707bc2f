"""`hetpipe cache`: lists the caches on disk; `hetpipe cache clear` empties them."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output

app = typer.Typer(help="List the caches on disk, or clear them.", invoke_without_command=True)


@app.callback()
def show(context: typer.Context, json: JsonOption = None) -> None:
    """List the caches: their folders, files and bytes. Everything in them can be made again."""
    if context.invoked_subcommand is not None:
        return
    from hetpipe.caches import present_caches
    from hetpipe.report.tables import Table
    from hetpipe.words import format_nbytes

    output = Output(json)
    table = Table("Caches", ("cache", "files", "size", "folder"), ("files", "size"))
    rows = []
    for cache in present_caches():
        sizes = cache.sizes_nbytes()
        folder, nbytes = str(cache.folder), sum(sizes)
        table.add_row(cache.name, str(len(sizes)), format_nbytes(nbytes), folder)
        rows.append({"name": cache.name, "files": len(sizes), "nbytes": nbytes, "folder": folder})
    output.console.print(table)
    output.finish({"caches": rows})


@app.command()
def clear(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A cache's name. \\[default: every cache]"),
    ] = None,
) -> None:
    """Delete the files of a cache, or of all caches."""
    from hetpipe.caches import present_caches
    from hetpipe.errors import HetpipeError
    from hetpipe.words import choices, format_nbytes

    output, caches = Output(None), present_caches()
    names = dict.fromkeys(cache.name for cache in caches)
    if name is not None and name not in names:
        raise HetpipeError(f"no cache {name!r}; {choices(name, names)}")
    for cache in caches:
        if name in (None, cache.name):
            sizes = cache.sizes_nbytes()
            try:
                cache.clear()
            except OSError as error:
                raise HetpipeError(f"cache {cache.name} is not cleared: {error}") from error
            output.text(
                f"{cache.name}: deleted {len(sizes)} files, {format_nbytes(sum(sizes))}, in "
                f"{cache.folder}"
            )
