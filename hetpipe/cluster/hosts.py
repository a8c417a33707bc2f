"""Clusters of several hosts: every host offers its devices, as members `host/device`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from hetpipe.cluster.local import local_members
from hetpipe.cluster.member import Member
from hetpipe.environment import torchrun_ranks
from hetpipe.errors import ClusterError, HetpipeError
from hetpipe.hosts.facts import Facts
from hetpipe.hosts.hosts import Hosts, Run
from hetpipe.hosts.meeting import (
    find_under_torchrun,
    gather,
    gather_under_torchrun,
    parse_address,
    reach,
)
from hetpipe.words import choices

AGENT = "hetpipe.crew.agent"
"""The module of agents. It drives crews, so it is above this one, and is loaded by name."""
DESCRIBE_S = 120.0
"""Seconds in which a host finds its devices."""


def meet_hosts(
    meet: str | None,
    count: int | None,
    agents: Sequence[str],
    name: str,
    limit_s: float,
    names: Sequence[str] = (),
) -> Hosts:
    """Return the hosts of this training, once all of them are there.

    With `names`, no other host may come to `meet`. Under torchrun the ranks other than 0 serve as
    agents; their processes end here.
    """
    if meet is not None and agents:
        raise ClusterError("meet and agents were given; give meet, or the addresses of agents")
    if agents:
        return reach([parse_address(text) for text in agents], name, limit_s)
    if meet is not None:
        if count is None or count < 1:
            raise ClusterError(f"count is {count}; give the number of hosts, with this one")
        return gather(parse_address(meet), count, name, limit_s, names=names)
    ranks = torchrun_ranks()
    if ranks is None:
        raise ClusterError(
            "nothing says where the other hosts are: start this script with torchrun, or give "
            "meet=HOST:PORT and count, or agents=[HOST:PORT, ...] (docs/hosts.md)"
        )
    serve_other_ranks(name, limit_s)
    return gather_under_torchrun(ranks, name, limit_s)


def serve_other_ranks(name: str, limit_s: float) -> None:
    """Serve as an agent if torchrun started this process with a rank other than 0, and end it."""
    ranks = torchrun_ranks()
    if ranks is None or ranks.rank == 0:
        return
    try:
        status = import_module(AGENT).serve_once(find_under_torchrun(ranks, limit_s), name, limit_s)
    except HetpipeError as error:
        print(f"hetpipe: {error}", file=sys.stderr)
        status = 1
    sys.exit(status)


def members_of_file(
    members: Sequence[Member], names: Sequence[str], hosts: Hosts
) -> tuple[Member, ...]:
    """Return the members of a cluster file, and the usual devices of each host without members.

    Raises `ClusterError` unless the hosts with these names have met, and no others.
    """
    machines = {facts.name: facts.machine for facts in hosts.facts}
    if machines.keys() != set(names):
        absent = ", ".join(name for name in names if name not in machines)
        more = ", ".join(name for name in machines if name not in names)
        raise ClusterError(
            f"the cluster file names the hosts {', '.join(names)}, and {', '.join(machines)} have "
            "met"
            + (f"; absent: {absent}" if absent else "")
            + (f"; unknown: {more}" if more else "")
        )
    used = {member.host for member in members}
    named = tuple(replace(member, machine=machines[member.host]) for member in members)
    return named + members_of(hosts, [name for name in names if name not in used], {})


def members_of(
    hosts: Hosts,
    devices: Sequence[str] | None,
    emulate_speed: Mapping[str, float],
) -> tuple[Member, ...]:
    """Return the members of all hosts. See `Cluster.local` for the arguments, whose names here are
    `host` or `host/device`. Raises `ClusterError` for an unknown host or device."""
    names = [facts.name for facts in hosts.facts]
    wanted = {name: _wanted(name, devices, names) for name in names}
    speeds = {name: _speeds(name, emulate_speed, names) for name in names}
    finishes: dict[str, Any] = {}
    for name, other in hosts.others.items():
        if wanted[name] != []:
            find = Run(local_members, (None, wanted[name], speeds[name], None))
            finishes[name] = other.begin(find)
    own = hosts.own.name
    found = {}
    if wanted[own] != []:
        found[own] = _placed(hosts.own, local_members(None, wanted[own], speeds[own], None))
    for name, finish in finishes.items():
        found[name] = _placed(hosts.others[name].facts, finish(DESCRIBE_S))
    return tuple(member for members in found.values() for member in members)


def notes_of(hosts: Hosts) -> list[str]:
    """Return notes for the user about hosts that share a machine or differ in versions."""
    notes = []
    machines: dict[str, list[str]] = {}
    for facts in hosts.facts:
        machines.setdefault(facts.machine, []).append(facts.name)
    for names in machines.values():
        if len(names) > 1:
            notes.append(
                f"hosts {', '.join(names)} are environments of one machine, and share its cores "
                "and memory"
            )
    if len({(facts.python, facts.torch, facts.numpy) for facts in hosts.facts}) > 1:
        versions = (
            f"{facts.name} has Python {facts.python}, torch {facts.torch}, numpy {facts.numpy}"
            for facts in hosts.facts
        )
        notes.append(f"versions differ: {'; '.join(versions)}")
    return notes


def _placed(facts: Facts, members: Sequence[Member]) -> list[Member]:
    """Return the members of a host, under names that are unique among hosts."""
    return [
        replace(
            m, id=f"{facts.name}/{m.id}", host=facts.name, machine=facts.machine, server=facts.name
        )
        for m in members
    ]


def _wanted(host: str, devices: Sequence[str] | None, hosts: Sequence[str]) -> list[str] | None:
    """Return the devices of a host among `devices`; None for the default ones."""
    if devices is None:
        return None
    wanted: list[str] = []
    for text in devices:
        name, _, device = text.partition("/")
        if name not in hosts:
            raise ClusterError(f"{text!r} names no host: {choices(name, hosts)}")
        if name == host and not device:
            return None
        if name == host:
            wanted.append(device)
    return wanted


def _speeds(host: str, speeds: Mapping[str, float], hosts: Sequence[str]) -> dict[str, float]:
    """Return the emulated speeds of a host's members."""
    own = {}
    for text, speed in speeds.items():
        name, _, device = text.partition("/")
        if name not in hosts:
            raise ClusterError(f"emulate_speed names {text!r}: {choices(name, hosts)}")
        if name == host:
            own[device] = speed
    return own
