"""Placement: the devices of each server that a stage gets (DAPPLE, section 4.2, figure 5).

An occupancy, or a group of devices, is a tuple of counts, one per server. Devices of a server are
equal, and fresh servers are used in their order: identical servers give one state, not many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from hetpipe.errors import PlanError

Counts = tuple[int, ...]


@dataclass(frozen=True)
class Wire:
    """A kind of link: bytes per second of a transfer and of an all-reduce. Raises `PlanError`."""

    p2p_Bps: float
    all_reduce_Bps: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("p2p_Bps", "all_reduce_Bps"):
            if not getattr(self, name) > 0:
                raise PlanError(f"{name} is {getattr(self, name)} bytes/s; give more than 0")
        if not 0 <= self.latency_s < inf:
            raise PlanError(f"latency_s is {self.latency_s}; give a finite one from 0")


@dataclass(frozen=True)
class Machines:
    """Servers of equal devices: `counts` of each, links `inside` and `between` the servers.

    `between` carries what all devices of a server send or receive together. With the `samples` of a
    micro-batch, costs are counted as in prices: replicas have whole samples, and each pair of
    devices has its own link. Raises `PlanError` without a device.
    """

    counts: Counts
    inside: Wire
    between: Wire
    samples: int | None = None

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 1:
            raise PlanError(f"the servers have {list(self.counts)} devices; give 1 or more each")

    @property
    def devices(self) -> int:
        return sum(self.counts)

    def part(self, replicas: int) -> float:
        """Return the largest share of a micro-batch that one of the replicas has."""
        if self.samples is None:
            return 1 / replicas
        return -(-self.samples // replicas) / self.samples

    def transfer_s(self, nbytes: float, source: Counts, target: Counts) -> float:
        """Return the seconds that the samples of a cut take from one group to the other, one way.

        A replica has an equal share of the samples, the groups' shares come in the order of their
        devices, and samples that both sides have on a server stay inside it. The fullest server and
        the fullest device decide: between servers of one device each, m replicas send to n at
        max(1 / m, 1 / n) of the bytes.
        """
        return max(fixed + each * nbytes for fixed, each in self.transfer_lines(source, target))

    def transfer_lines(self, source: Counts, target: Counts) -> tuple[tuple[float, float], ...]:
        """Return latency and seconds per byte, between servers and inside; 0 for no transfer."""
        senders, receivers = sum(source), sum(target)
        if self.samples is not None:
            together = [max(pair) > 0 for pair in zip(source, target, strict=True)]
            wire = self.inside if sum(together) == 1 else self.between
            share = max(self.part(senders), self.part(receivers))
            return ((wire.latency_s, share / wire.p2p_Bps),) * 2
        across = within = 0.0
        for mine, others in zip(source, target, strict=True):
            sent, received = mine / senders, others / receivers
            kept = min(sent, received)
            across = max(across, abs(sent - received))
            if kept > 0:
                within = max(within, kept / mine, kept / others)
        lines = []
        for share, wire in ((across, self.between), (within, self.inside)):
            lines.append((wire.latency_s, share / wire.p2p_Bps) if share > 0 else (0.0, 0.0))
        return tuple(lines)

    def all_reduce_s(self, nbytes: float, group: Counts) -> float:
        """Return the seconds of a ring: 2 (r-1) (latency + nbytes / (r slowest link))."""
        replicas = sum(group)
        wire = self.between if sum(count > 0 for count in group) > 1 else self.inside
        rounds = 2 * (replicas - 1)
        return rounds * (wire.latency_s + nbytes / (replicas * wire.all_reduce_Bps))


def places(counts: Counts, used: Counts, replicas: int) -> tuple[Counts, ...]:
    """Return the groups of `replicas` free devices by the three policies, each once.

    Fresh First begins with servers without a used device, Append First with the others; both fill a
    server before the next. Scatter First deals devices out in turn, among the servers in use, or
    among all if all are fresh. A policy whose servers are full continues with the others.
    """
    free, fresh, begun = _servers(counts, used)
    groups = (
        _fill(free, fresh + begun, replicas),
        _fill(free, begun + fresh, replicas),
        _scatter(free, begun or fresh, fresh, replicas),
    )
    return tuple(dict.fromkeys(groups))


def append_first(counts: Counts, used: Counts, replicas: int) -> Counts:
    """Return the group by Append First: it fills server after server."""
    free, fresh, begun = _servers(counts, used)
    return _fill(free, begun + fresh, replicas)


def numbers(counts: Counts, used: Counts, group: Counts) -> tuple[int, ...]:
    """Return the group's device numbers, which count server by server, used ones first."""
    first, devices = 0, list[int]()
    for count, taken, more in zip(counts, used, group, strict=True):
        devices += range(first + taken, first + taken + more)
        first += count
    return tuple(devices)


def _servers(counts: Counts, used: Counts) -> tuple[Counts, list[int], list[int]]:
    """Return each server's free devices; the servers without a used device, and with one."""
    free = tuple(count - taken for count, taken in zip(counts, used, strict=True))
    fresh = [server for server, taken in enumerate(used) if not taken]
    return free, fresh, [server for server, taken in enumerate(used) if taken]


def _fill(free: Counts, order: Sequence[int], replicas: int) -> Counts:
    group = [0] * len(free)
    for server in order:
        group[server] = min(free[server], replicas - sum(group))
    return tuple(group)


def _scatter(free: Counts, among: Sequence[int], fresh: Sequence[int], replicas: int) -> Counts:
    group = [0] * len(free)
    while sum(group) < replicas:
        open_servers = [server for server in among if group[server] < free[server]] or [
            server for server in fresh if group[server] < free[server]
        ]
        for server in open_servers[: replicas - sum(group)]:
            group[server] += 1
    return tuple(group)
