"""Crews of devices that are always there."""

from __future__ import annotations

from collections.abc import Sequence

from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew

UNLIKE = ("numpy:cpu:0", "pytorch:cpu:0")


def crew_of(devices: Sequence[str], transport: str = "local") -> Crew:
    """A started crew whose members are m0, m1, ... on these devices."""
    members = tuple(Member(f"m{n}", device) for n, device in enumerate(devices))
    return Crew.start(Cluster(members, transport=transport))
