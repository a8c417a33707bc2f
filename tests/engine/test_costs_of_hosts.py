"""Costs of several hosts are kept by the kinds of the hosts, not by their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agents import end, free_address, patched_secret, start_agent
from torch import nn

import hetpipe as hp
from hetpipe.capture.captured import Captured
from hetpipe.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.profile import measure
from hetpipe.profile.links import Links
from hetpipe.profile.losses import host_link
from hetpipe.profile.measure import profile
from hetpipe.profile.rounds import Effort
from hetpipe.profile.stored import cost_parts, stored_costs

DEVICES = "pytorch:cpu:0", "numpy:cpu:0"


@contextmanager
def two_hosts(own: str, other: str, machine: str) -> Iterator[Crew]:
    """Yield a crew on two hosts of these names, on one machine with this id."""
    address = free_address()
    agent = start_agent("--meet", address, "--name", other)
    names = (own, other)
    with patched_secret():
        devices = [f"{name}/{device}" for name, device in zip(names, DEVICES, strict=True)]
        cluster = Cluster.hosts(address, 2, devices=devices, name=own, limit_s=60)
    members = tuple(replace(member, machine=machine) for member in cluster.members)
    try:
        with Crew.start(replace(cluster, members=members)) as crew:
            yield crew
    finally:
        assert cluster.connections is not None
        cluster.connections.close()
        end(agent)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    example = torch.randn(8, 6), torch.randint(0, 4, (8,))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return Captured(model, nn.functional.cross_entropy, example)


def shared(_: Crew, links: Links) -> Links:
    """Return the links as if each host's messages shared its card."""
    return {way: replace(x, media=(f"{way[0][0]} up", way[1][0])) for way, x in links.items()}


def test_a_second_start_under_other_names_measures_nothing(
    captured: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a reboot the machine has another id, and containers have other names."""
    monkeypatch.setenv("HETPIPE_CACHE", str(tmp_path))
    monkeypatch.setattr(measure, "with_cards", shared)
    optimizer = hp.optim.sgd(0.1)
    efforts: list[Effort] = []
    with two_hosts("a", "b", "first boot") as crew:
        first = profile(captured, crew, optimizer, [4], report=efforts.append, half_s=0.01)[4]
        way = host_link(crew, "b/numpy:cpu:0")
        assert len(efforts) == 1
    entries = set(tmp_path.glob("costs/*"))
    with two_hosts("c", "d", "second boot") as crew:
        loads = crew.load_count
        again = profile(captured, crew, optimizer, [4], report=efforts.append)[4]
        assert host_link(crew, "d/numpy:cpu:0") == way
        assert len(efforts) == 1
        assert crew.load_count == loads  # no link was measured
        assert set(tmp_path.glob("costs/*")) == entries
        members = dict(zip(first.devices, again.devices, strict=True))
        assert list(members.values()) == ["c/pytorch:cpu:0", "d/numpy:cpu:0"]
        renamed = {(members[a], members[b]): x for (a, b), x in first.links.items()}
        assert again.links == shared(crew, renamed)
        domains = {cost.memory_domain for cost in again.devices.values()}
        assert domains == {"host@second boot"}
        check_that_other_hosts_have_other_costs(captured, crew, optimizer)


def check_that_other_hosts_have_other_costs(captured: Captured, crew: Crew, optimizer: Any) -> None:
    """Change one fact after another about a host or the network."""

    def parts() -> dict[str, object]:
        return cost_parts(captured, crew, optimizer)

    assert stored_costs(captured, crew, optimizer, [4]).keys() == {4}
    found = [parts()]
    connections = crew.cluster.connections
    assert connections is not None
    host = connections.others["d"]
    facts, door, members = host.facts, host.door, crew.cluster.members
    for fact in ("processor", "torch", "numpy", "python"):
        host.facts = replace(facts, **{fact: "other"})
        assert stored_costs(captured, crew, optimizer, [4]) == {}
        found.append(parts())
    host.facts, host.door = facts, ("10.0.0.2", 1)
    found.append(parts())
    host.door = door
    apart = replace(members[1], machine="another machine")
    crew.cluster = replace(crew.cluster, members=(members[0], apart))
    found.append(parts())
    crew.cluster = replace(crew.cluster, transport="tls")
    found.append(parts())
    assert all(found.count(one) == 1 for one in found)
