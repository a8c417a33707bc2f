"""`hetpipe papers`: programs that reproduce a table or figure of a paper on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    help="Tables and figures of papers, reproduced: clockwork, learning, memory, overhead; and "
    "rebalance, a device that slows in mid-run.",
    no_args_is_help=True,
)


@app.command()
def clockwork() -> None:
    """Schedules on devices that only sleep: measured, simulated, and by the papers' formulas."""
    from hetpipe.papers import clockwork

    clockwork.main()


@app.command()
def memory() -> None:
    """Peak bytes by schedule and recomputation, and bytes that stages exchange."""
    from hetpipe.papers import memory

    memory.main()


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def learning(context: typer.Context) -> None:
    """How asynchronous methods learn beside plain training; `learning --help` has its options."""
    from hetpipe.papers import learning

    learning.main(context.args)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def rebalance(context: typer.Context) -> None:
    """A device slows in mid-run and recovers; `rebalance --help` has its options."""
    from hetpipe.papers import rebalance

    rebalance.main(context.args)


@app.command()
def overhead(
    device: Annotated[str, typer.Argument(metavar="DEVICE", help="A device's id.")] = (
        "pytorch:cpu:0"
    ),
) -> None:
    """Cost of an action that computes nothing, in seconds, by transport."""
    from hetpipe.papers import overhead

    overhead.main(device)
