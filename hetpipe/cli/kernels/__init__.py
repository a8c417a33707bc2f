"""`hetpipe kernels`: the workbench for kernels; each command has a file."""

from __future__ import annotations

import typer

from hetpipe.cli.kernels import bench, build, export, tune
from hetpipe.cli.kernels import list as list_command
from hetpipe.cli.kernels import test as test_command
from hetpipe.cli.meet import check_command

app = typer.Typer(
    help="Test, measure and tune kernels of a backend or your own; export a plan's kernels.",
    no_args_is_help=True,
)
_COMMANDS = {
    "list": list_command, "test": test_command, "bench": bench, "tune": tune, "export": export,
    "build": build,
}  # fmt: skip
for _name, _module in _COMMANDS.items():
    app.command(name=_name)(_module.command)


@app.callback()
def start(context: typer.Context) -> None:
    """Make the checks before every command."""
    check_command(f"kernels {context.invoked_subcommand}")
