"""The requests of a controller to the agents of other hosts, and the messages about their crews."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetpipe.cluster.cluster import Cluster
from hetpipe.wire.ends import WireEnd


@dataclass(frozen=True)
class Launch:
    """Start a worker for each member of `cluster`, as workers of the crew number `crew`.

    `sharing` are the members that share cores with another member, perhaps of another host. `wires`
    is the crew's name in the names of its wires between hosts.
    """

    crew: int
    wires: str
    cluster: Cluster
    heartbeat_s: float
    silence_s: float
    start_timeout_s: float
    sharing: frozenset[str]


@dataclass(frozen=True)
class Connect:
    """Give a worker its ends of wires, for the next `Load`; see `Fleet.connect`."""

    crew: int
    worker: int
    ends: Sequence[WireEnd]


@dataclass(frozen=True)
class Leave:
    """End the workers of a crew. The answer comes when none of them runs."""

    crew: int


@dataclass(frozen=True)
class Failed:
    """From an agent: a crew has failed on its host, because it has lost these of its workers."""

    text: str
    trace: str
    lost: Sequence[int] = ()
