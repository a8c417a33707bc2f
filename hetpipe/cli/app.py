"""The commands, each in a file of its own."""

from __future__ import annotations

import typer

from hetpipe.cli import bench, devices, doctor, plan, profile, train

app = typer.Typer(
    help="Train one PyTorch model across every accelerator in the room, whoever made it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for module in (doctor, devices, profile, plan, train, bench):
    app.command(name=module.__name__.rpartition(".")[2])(module.command)
