"""`hetpipe kernels list`: lists the kernels that come with backends."""

from __future__ import annotations

from dataclasses import asdict

from hetpipe.cli.options import JsonOption
from hetpipe.cli.output import Output


def command(json: JsonOption = None) -> None:
    """Show the kernels that come with backends, by backend and file."""
    from hetpipe.report.tables import Table
    from hetpipe.workbench.runners import runners

    output = Output(json)
    kernels = {name: runner.shipped() for name, runner in runners()}
    table = Table("Kernels", ("backend", "file", "kernels", "purpose"), keys=2)
    for name, shipped in kernels.items():
        files: dict[str, list[str]] = {}
        purposes = {each.file: each.purpose for each in shipped}
        for each in shipped:
            files.setdefault(each.file, []).append(each.name)
        for file, names in files.items():
            table.add_row(name, file, ", ".join(names), purposes[file])
    output.console.print(table)
    output.finish({"kernels": {name: [asdict(each) for each in kernels[name]] for name in kernels}})
