"""Stored costs: their keys, and their members under names that last.

A machine has another id after each boot, and a container often another name. So entries of the
cache number the hosts and the machines of a cluster. Costs are found again by the kinds of the
hosts: processor, cores and versions. Hosts of equal kinds share costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

import hetpipe
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.hosts.meeting import is_loopback
from hetpipe.profile import cache
from hetpipe.profile.profiler import RULES
from hetpipe.profile.room import with_room

if TYPE_CHECKING:
    from hetpipe.capture.captured import Captured
    from hetpipe.optim.rule import Optimizer


class LastingNames:
    """Names for the members of a crew that do not depend on the names of hosts and machines."""

    def __init__(self, crew: Crew) -> None:
        self._crew, members = crew, crew.cluster.members
        self._hosts = _numbers(member.host for member in members)
        self._machines = _numbers(member.machine for member in members)
        self._names = {}
        for member in members:
            own = member.id.removeprefix(f"{member.host}/")
            self._names[member.id] = (
                member.id if own == member.id else f"{self._hosts[member.host]}/{own}"
            )

    def facts(self, member_id: str) -> list[dict[str, Any]]:
        """Return everything about a member, its device and its host on which costs depend."""
        member, info = self._crew.cluster.member(member_id), self._crew.infos[member_id]
        if not member.host:
            return [asdict(member), asdict(info)]
        host, machine = self._hosts[member.host], self._machines[member.machine]
        named = replace(member, id=self._names[member_id], host=host, machine=machine, server=host)
        memory, address = (
            text.replace(f"@{member.machine}", f"@{machine}")
            for text in (info.memory_domain, info.address)
        )
        return [
            asdict(named),
            asdict(replace(info, memory_domain=memory, address=address)),
            self._kind_of(member.host),
        ]

    def pair(self, members: Collection[str]) -> list[str]:
        """Return the names of two members, in order."""
        return sorted(self._names[member] for member in members)

    def of(self, table: CostTable) -> CostTable:
        """Return a table with these names."""
        return _renamed(table, self._names, self._hosts)

    def back(self, table: CostTable) -> CostTable:
        """Return a table with the crew's names, and the memories of its devices."""
        members, hosts = _inverse(self._names), _inverse(self._hosts)
        table = _renamed(table, members, hosts)
        devices = {
            member: replace(cost, memory_domain=self._crew.infos[member].memory_domain)
            for member, cost in table.devices.items()
        }
        return replace(table, devices=devices)

    def _kind_of(self, host: str) -> dict[str, Any]:
        """Return the facts about a host that outlast a start, and whether it is behind a
        network."""
        hosts = self._crew.cluster.connections
        assert hosts is not None
        (facts,) = (facts for facts in hosts.facts if facts.name == host)
        memories = _numbers(facts.memory for facts in hosts.facts)
        kind = {key: value for key, value in asdict(facts).items() if key not in _PASSING}
        other = hosts.others.get(host)
        network = other is not None and not is_loopback(other.door[0])
        return {**kind, "network": network, "memory": memories[facts.memory]}


_PASSING = ("name", "machine", "memory")
"""Facts about a host that may change from start to start."""


def _numbers(texts: Iterable[str]) -> dict[str, str]:
    return {text: str(number) for number, text in enumerate(dict.fromkeys(texts))}


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {name: each for each, name in names.items()}


def _renamed(table: CostTable, names: Mapping[str, str], hosts: Mapping[str, str]) -> CostTable:
    def renamed(medium: str) -> str:
        host, *direction = medium.split(" ")
        return " ".join((hosts[host], *direction))

    links = {
        (names[one], names[other]): replace(link, media=tuple(map(renamed, link.media)))
        for (one, other), link in table.links.items()
    }
    devices = {names[id]: cost for id, cost in table.devices.items()}
    return replace(table, devices=devices, links=links)


def stored_costs(
    captured: Captured, crew: Crew, optimizer: Optimizer, samples: Sequence[int]
) -> dict[int, CostTable]:
    """Return the tables that an earlier `profile` has stored, without a measurement."""
    return with_room(load_tables(entries_of(captured, crew, optimizer, samples), crew), crew)


def load_tables(entries: Mapping[int, str], crew: Crew) -> dict[int, CostTable]:
    """Return the stored tables of these entries, by micro-batch size."""
    contents = {size: cache.load(entry) for size, entry in entries.items()}
    back = LastingNames(crew).back
    return {
        size: back(CostTable.from_json(data)) for size, data in contents.items() if data is not None
    }


def store_table(entry: str, table: CostTable, crew: Crew) -> None:
    """Store a table for later starts."""
    cache.store(entry, LastingNames(crew).of(table).to_json())


def entries_of(
    captured: Captured, crew: Crew, optimizer: Optimizer, samples: Sequence[int]
) -> dict[int, str]:
    """Return the names of cache entries, by micro-batch size. Names differ if costs may differ."""
    parts = cost_parts(captured, crew, optimizer)
    return {size: cache.key({**parts, "samples": size}) for size in samples}


def cost_parts(captured: Captured, crew: Crew, optimizer: Optimizer) -> dict[str, object]:
    """Return everything on which the costs of any micro-batch depend."""
    names = LastingNames(crew)
    return {
        "model": captured.fingerprint,
        "optimizer": [
            optimizer.name,
            *map(list, optimizer.settings.items()),
            *optimizer.members(captured.parameters),
            *(list(rule.state) for rule in optimizer.rules),
        ],
        "versions": [hetpipe.__version__, torch.__version__, RULES],
        "members": [names.facts(member) for member in crew.cluster.ids],
        "links": sorted(
            [names.pair(pair), asdict(link)] for pair, link in crew.cluster.links.items()
        ),
        "transport": crew.cluster.transport,
    }
