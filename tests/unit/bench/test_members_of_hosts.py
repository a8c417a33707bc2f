"""Rows with plain torch are those of the first host, so only its members are compared with them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hetpipe.bench.outcome import own_members
from hetpipe.bench.peer import refusal
from hetpipe.cluster import Cluster, Member


def test_only_members_of_the_first_host_are_compared_with_its_torch() -> None:
    members = tuple(Member(f"{host}/own", "numpy:cpu:0", (0,), host=host) for host in "ab")
    hosts: Any = SimpleNamespace(own=SimpleNamespace(name="a"))
    cluster = Cluster(members, connections=hosts)
    assert own_members(cluster) == [members[0]]
    assert own_members(Cluster(members)) == [*members]
    workload: Any = SimpleNamespace(blocks=("0", "1"))
    assert refusal(workload, cluster, 8, (8,)) == "it would need gloo between hosts"
