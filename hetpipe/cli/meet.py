"""The hosts of a command that torchrun started on several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import typer

from hetpipe.environment import refuse_ranks, torchrun_ranks
from hetpipe.errors import BackendError
from hetpipe.words import choices

if TYPE_CHECKING:
    from hetpipe.hosts.hosts import Hosts
    from hetpipe.sdk.info import DeviceInfo

T = TypeVar("T")
ACROSS = (
    "bench", "conform", "devices", "doctor", "kernels export", "kernels test", "plan", "profile",
    "report", "train",
)  # fmt: skip
"""The commands that use the devices of all hosts. All others run on the first host alone."""
MEET_S = 120.0
"""Seconds in which the hosts of a command meet."""
SURVEY_S = 180.0
"""Seconds in which another host finds its devices."""


def check_command(command: str) -> None:
    """Meet the other hosts if torchrun started this command on several.

    If the command runs on the first host alone, end it on the others.
    """
    ranks = torchrun_ranks()
    if ranks is None or command in ACROSS:
        hosts_of_command()
    elif ranks.rank:
        raise typer.Exit


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


class Place(NamedTuple):
    """A device of a host; the host is "" if this is the only one."""

    host: str
    info: DeviceInfo

    @property
    def id(self) -> str:
        """The name of the device, with its host if there are several."""
        return f"{self.host}/{self.info.id}" if self.host else self.info.id


def on_each_host(function: Callable[..., T], *arguments: Any) -> dict[str, T]:
    """Return the results of a function of hetpipe by host; the host is "" if it is the only one."""
    hosts = hosts_of_command()
    return (
        {"": function(*arguments)}
        if hosts is None
        else hosts.call_all(SURVEY_S, function, *arguments)
    )


def places(
    found: Mapping[str, Sequence[DeviceInfo]], named: Sequence[str], kind: str = ""
) -> list[Place]:
    """Return the named devices of all hosts; without names, every device.

    A name without a host stands for this device of each host. Raises `BackendError` for a name
    that no host has; `kind` is a word about the devices for its text.
    """
    there = [Place(host, info) for host, infos in found.items() for info in infos]
    if not named:
        return there
    chosen = []
    for name in named:
        matching = [place for place in there if name in (place.id, place.info.id)]
        if not matching:
            known = choices(name, [each.id for each in there])
            raise BackendError(f"no device {name!r}{kind}; {known}")
        chosen += matching
    return chosen
