"""`hetpipe agent`: offer this host's devices to trainings on other hosts."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    meet: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Join the training that waits at this address."),
    ] = "",
    stay: Annotated[
        bool, typer.Option("--stay", help="Serve one training after another, until Ctrl-C.")
    ] = False,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="With --stay: this host's address for others."),
    ] = "",
    name: Annotated[
        str, typer.Option(help="This host's name in the cluster; by default the system's name.")
    ] = "",
    limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to try to reach the training.", min=0)
    ] = 120.0,
) -> None:
    """Offer this host's devices to a training on another host (docs/hosts.md).

    The hosts share a secret: `hetpipe secret FILE` writes one, and the environment variable
    HETPIPE_SECRET_FILE names the file on each host.
    """
    from hetpipe.crew import agent
    from hetpipe.errors import ClusterError
    from hetpipe.hosts.meeting import parse_address

    if stay == bool(meet) or bool(listen) != stay:
        raise ClusterError(
            "write either --meet HOST:PORT, the address of a training, or --stay --listen "
            "HOST:PORT, this host's own address"
        )
    if stay:
        agent.stay(parse_address(listen), name)
    raise typer.Exit(agent.serve_once(parse_address(meet), name, limit))
