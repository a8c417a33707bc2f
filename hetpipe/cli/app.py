"""The typer application with all commands; each command has a file."""

from __future__ import annotations

from typing import Annotated

import typer

from hetpipe.cli import (
    agent,
    bench,
    boards,
    cache,
    capacity,
    checkpoint,
    compare,
    conform,
    coverage,
    devices,
    doctor,
    failures,
    kernels,
    matmul,
    new_backend,
    papers,
    plan,
    profile,
    report,
    reproduce,
    secret,
    simulate,
    train,
    whatif,
    zoo,
)
from hetpipe.cli.meet import check_command
from hetpipe.cli.options import flat

app = typer.Typer(
    help="Train one PyTorch model across every accelerator in the room, whoever made it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
COMMANDS = (
    doctor, devices, boards, profile, plan, simulate, compare, whatif, capacity, failures, coverage,
    reproduce, train, report, bench, matmul, zoo, new_backend, conform, agent, secret,
)  # fmt: skip
for module in COMMANDS:
    app.command(name=module.__name__.rpartition(".")[2].replace("_", "-"))(flat(module.command))
app.add_typer(kernels.app, name="kernels")
app.add_typer(papers.app, name="papers")
app.add_typer(cache.app, name="cache")
app.add_typer(checkpoint.app, name="checkpoint")


def _print_version(asked: bool) -> None:
    if asked:
        from hetpipe import __version__

        typer.echo(f"hetpipe {__version__}")
        raise typer.Exit


@app.callback()
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options of `hetpipe` itself, and make the checks before every command."""
    if context.invoked_subcommand != "kernels":  # checks its own commands
        check_command(context.invoked_subcommand or "")
