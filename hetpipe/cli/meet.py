"""The hosts of a command that torchrun started on several of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import typer

from hetpipe.environment import refuse_ranks, torchrun_ranks
from hetpipe.errors import ClusterError

if TYPE_CHECKING:
    from hetpipe.hosts.hosts import Hosts

ACROSS = ("devices", "doctor", "plan", "profile", "train")
"""The commands that work over several hosts."""
MEET_S = 120.0
"""Seconds in which the hosts of a command meet."""


def check_command(command: str) -> None:
    """Meet the other hosts if torchrun started this command on several.

    A command that works on one host raises `ClusterError` on the first host, and ends on the
    others.
    """
    ranks = torchrun_ranks()
    if ranks is None or ranks.count == 1 or command in ACROSS:
        hosts_of_command()
    elif ranks.rank:
        raise typer.Exit
    else:
        raise ClusterError(
            f"hetpipe {command} works on one host, but torchrun started it on {ranks.count}: run "
            f"it on each host without torchrun (these work over hosts: {', '.join(ACROSS)})"
        )


@cache
def hosts_of_command() -> Hosts | None:
    """Return the hosts on which torchrun runs this command; None for this host alone.

    On all hosts but the first one the process serves, and ends here. Raises `ClusterError`.
    """
    if torchrun_ranks() is None:
        refuse_ranks()
        return None
    from hetpipe.cluster.hosts import meet_hosts

    return meet_hosts(None, None, (), "", MEET_S)
