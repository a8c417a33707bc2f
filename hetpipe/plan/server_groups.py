"""Placement: the devices of each server that a stage gets (DAPPLE, section 4.2, figure 5).

Used devices, and groups of devices, are tuples of counts, one count per server. The devices of a
server are equal. Servers without a used device are filled in their order, so that equal servers do
not make many equal states. More than `MANY` devices are used in the order of their numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from hetpipe.errors import PlanError

Counts = tuple[int, ...]

MANY = 16  # with more devices than this, the search tries fewer numbers of replicas and places
PARTS = 256
"""With more devices than this, each stage has at least devices / `PARTS` replicas."""


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
            raise PlanError(f"latency_s is {self.latency_s}; give a finite number, 0 or more")


@dataclass(frozen=True)
class Machines:
    """Servers of equal devices: the `counts` of devices by server, the links `inside` a server and
    `between` servers.

    All devices of a server send and receive on the same link `between` servers. But if `samples`,
    the samples of a micro-batch, are given, costs are counted as in `stage_times`: replicas have
    whole samples, and each pair of devices has a separate link. Raises `PlanError` for a server
    without a device.
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
        """Return the seconds in which the tensors of a cut move from one group to another.

        Every replica has an equal share of the samples. Samples that both groups have on the same
        server stay inside this server. The server, or the device, that moves most bytes decides:
        between m and n servers of one device each, max(1 / m, 1 / n) of the bytes count.
        """
        return max(fixed + each * nbytes for fixed, each in self.transfer_lines(source, target))

    def transfer_lines(self, source: Counts, target: Counts) -> tuple[tuple[float, float], ...]:
        """Return (latency, seconds per byte) between servers, and inside; zeros for no transfer."""
        senders, receivers = sum(source), sum(target)
        if self.samples is not None:
            together = [max(pair) > 0 for pair in zip(source, target, strict=True)]
            return self._pair_lines(senders, receivers, sum(together) == 1)
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
        return self._ring_s(nbytes, sum(group), sum(count > 0 for count in group) == 1)

    def next_lines(self, first: int, source: int, target: int) -> tuple[tuple[float, float], ...]:
        """Return `transfer_lines` between `source` devices, which begin with number `first`, and
        the next `target` devices."""
        whole = self._servers(first, source + target)
        if self.samples is not None:
            return self._pair_lines(source, target, len(whole) == 1)
        groups = (first, source), (first + source, target)
        return self.transfer_lines(*(self._counts(whole, *group) for group in groups))

    def next_all_reduce_s(self, nbytes: float, first: int, replicas: int) -> float:
        """Return `all_reduce_s` of `replicas` devices, which begin with number `first`."""
        return self._ring_s(nbytes, replicas, len(self._servers(first, replicas)) == 1)

    @cached_property
    def _ends(self) -> list[int]:
        """By server, the number of the next server's first device."""
        return [*accumulate(self.counts)]

    def _servers(self, first: int, devices: int) -> range:
        """Return the servers of `devices` devices, which begin with number `first`."""
        last = first + devices - 1
        return range(bisect_right(self._ends, first), bisect_right(self._ends, last) + 1)

    def _counts(self, servers: range, first: int, devices: int) -> Counts:
        """Return how many of `devices` devices are in each server."""
        spans = [(self._ends[n] - self.counts[n], self._ends[n]) for n in servers]
        return tuple(max(0, min(hi, first + devices) - max(lo, first)) for lo, hi in spans)

    def _pair_lines(
        self, senders: int, receivers: int, together: bool
    ) -> tuple[tuple[float, float], ...]:
        """Return `transfer_lines` if each pair of devices has a separate link."""
        wire = self.inside if together else self.between
        share = max(self.part(senders), self.part(receivers))
        return ((wire.latency_s, share / wire.p2p_Bps),) * 2

    def _ring_s(self, nbytes: float, replicas: int, together: bool) -> float:
        wire = self.inside if together else self.between
        rounds = 2 * (replicas - 1)
        return rounds * (wire.latency_s + nbytes / (replicas * wire.all_reduce_Bps))


def places(counts: Counts, used: Counts, replicas: int) -> tuple[Counts, ...]:
    """Return the groups of `replicas` free devices by the three policies, each once.

    Fresh First begins with servers without a used device, Append First with servers that have one;
    both fill a server before the next. Scatter First takes a device from each server in turn, among
    the servers with a used device, or among all servers if no device is used. A policy whose
    servers are full continues with the other servers.
    """
    free, fresh, begun = _servers(counts, used)
    groups = (
        _fill(free, fresh + begun, replicas),
        _fill(free, begun + fresh, replicas),
        _scatter(free, begun or fresh, fresh, replicas),
    )
    return tuple(dict.fromkeys(groups))


def numbers(counts: Counts, used: Counts, group: Counts) -> tuple[int, ...]:
    """Return the numbers of a group's devices: the next free numbers of each server."""
    first, devices = 0, list[int]()
    for count, taken, more in zip(counts, used, group, strict=True):
        devices += range(first + taken, first + taken + more)
        first += count
    return tuple(devices)


def _servers(counts: Counts, used: Counts) -> tuple[Counts, list[int], list[int]]:
    """Return each server's number of free devices, the servers without a used device, and the
    servers with one."""
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


def widths(devices: int) -> Sequence[int]:
    """Return the numbers of replicas to try: all; for many devices, powers of two and `devices`."""
    return range(1, devices + 1) if devices <= MANY else powers(devices)


def powers(devices: int) -> list[int]:
    """Return `devices` and the powers of two below it, not less than `devices` / `PARTS`."""
    powers = {1 << power for power in range(devices.bit_length())}
    return sorted({count for count in powers if count * PARTS >= devices} | {devices})


def fewest_stages(devices: int, replicas: Sequence[int]) -> list[float]:
    """Return, by number of devices, the fewest stages that use them all; infinite if none do."""
    fewest = [0.0]
    for count in range(1, devices + 1):
        before = (fewest[count - each] for each in replicas if each <= count)
        fewest.append(1 + min(before, default=inf))
    return fewest
