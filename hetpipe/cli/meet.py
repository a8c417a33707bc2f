"""The hosts of a command that torchrun started on several of them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from hetpipe.environment import refuse_ranks, torchrun_ranks

if TYPE_CHECKING:
    from hetpipe.hosts.hosts import Hosts

MEET_S = 120.0
"""Seconds in which the hosts of a command meet."""


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
