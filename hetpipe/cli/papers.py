"""`hetpipe papers`: programs that reproduce a table or figure of a paper on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Reproduce tables and figures of papers: clockwork, learning, memory, overhead. The "
    "command rebalance comes from no paper: a device slows down during a run.",
    no_args_is_help=True,
)


@app.command()
def clockwork() -> None:
    """Compare measured, simulated and computed times of schedules on devices that only sleep."""
    from hetpipe.papers import clockwork

    clockwork.main()


@app.command()
def memory() -> None:
    """Show peak bytes of schedules, with and without recomputation, and bytes between stages."""
    from hetpipe.papers import memory

    memory.main()


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def learning(context: typer.Context) -> None:
    """Compare how asynchronous methods and plain training learn; options: `learning --help`."""
    from hetpipe.papers import learning

    learning.main(context.args)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def rebalance(context: typer.Context) -> None:
    """Train while a device slows down and recovers; options: `rebalance --help`."""
    from hetpipe.papers import rebalance

    rebalance.main(context.args)


@app.command()
def overhead(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id.")] = (
        "pytorch:cpu:0"
    ),
) -> None:
    """Measure the time of an action that computes nothing, for each transport."""
    from hetpipe.papers import overhead

    overhead.main(device)
