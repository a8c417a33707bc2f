"""The members that a training has lost, and whether they are back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace

from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.parts import with_speed, without
from hetpipe.crew.workers import Workers
from hetpipe.errors import ClusterError, HetpipeError, WorkerError

FIRST_S = 10.0
"""Seconds after a loss until hetpipe looks whether the member is back. They are doubled if it was
lost again soon after it had joined."""
STEADY = 10
"""A member that has joined is steady once it has worked for as many times its first wait."""
GROWTH = 0.25
"""Seconds until the next look, as a share of the seconds since the loss."""
LONGEST_S = 600.0
OPEN_S = 120.0
"""Seconds in which a device opens, as at the start of a crew."""


class Absent:
    """Looks now and then whether lost members are back, and never waits for them.

    A member is back if a worker starts, opens its device, and reaches the other hosts: they may
    live, and only the link between two of them be broken.
    """

    def __init__(self, cluster: Cluster) -> None:
        """`cluster` has all members."""
        self._cluster = cluster
        self._firsts_s: dict[str, float] = {}  # from a member's last loss to the first look
        self._lost_s: dict[str, float] = {}
        self._joined_s: dict[str, float] = {}
        self._due_s: dict[str, float] = {}  # of the lost members
        self._back: set[str] = set()
        self._trial: tuple[str, Workers, float] | None = None  # with its begin
        self._retried_at = -1

    @property
    def back(self) -> Collection[str]:
        """The lost members that can be used again."""
        return self._back

    def cluster(self, present: Cluster, lost: Collection[str] = ()) -> Cluster:
        """Return the cluster of the present members without lost ones, and of the members that are
        back, in the first order. Raises `ClusterError` if there is none."""
        return self._cluster_with(self._back, present, lost)

    def remaining(self, present: Cluster, lost: Collection[str], number: int) -> Cluster:
        """Note a loss at the mini-batch of this number. Return the cluster that continues.

        If no member is left, all members whose hosts answer are tried again as a last resort, once
        at a mini-batch. Raises `ClusterError` if there is none, or the second time.
        """
        self.lose(lost)
        try:
            cluster = self.cluster(present, lost)
        except ClusterError:
            if number == self._retried_at:
                raise
            self._retried_at = number
            self.close()
            cluster = self._cluster_with({*self._back, *self._due_s}, present)
            self._back |= {*cluster.ids}
            for member in cluster.ids:
                self._due_s.pop(member, None)
        self.join(cluster)
        self.lose(id for id in present.ids if id not in (*lost, *cluster.ids))  # with their hosts
        return cluster

    def _cluster_with(
        self, back: Collection[str], present: Cluster, lost: Collection[str] = ()
    ) -> Cluster:
        """Return the cluster of the present members without lost ones, and of those in `back`."""
        here = {member.id: member for member in present.members if member.id not in lost}
        silent = _silent_hosts(present)
        gone = [
            member.id
            for member in self._cluster.members
            if member.host in silent or (member.id not in here and member.id not in back)
        ]
        cluster = without(self._cluster, gone)
        members = tuple(here.get(member.id, member) for member in cluster.members)
        return replace(cluster, members=members)

    def set_speed(self, present: Callable[[], Workers], member: str, speed: float) -> None:
        """Emulate another speed on a member, or on a lost one once it is back. Raises
        `HetpipeError` for an unknown member or a wrong speed.

        A crew that replaces the `present` one at this moment gets the speed by `emulate`.
        """
        self._cluster = with_speed(self._cluster, member, speed)
        crew = present()
        if member in crew.cluster.ids or member not in self._cluster.ids:
            with suppress(WorkerError):  # the next call survives the loss
                crew.set_speed(member, speed)

    def emulate(self, crew: Workers) -> None:
        """Give the members of a new crew the speeds that were set while it started."""
        for member in crew.cluster.members:
            speed = self._cluster.member(member.id).speed
            if member.speed != speed:
                crew.set_speed(member.id, speed)

    def lose(self, members: Iterable[str]) -> None:
        """Note a loss."""
        now_s = time.monotonic()
        for member in members:
            self._back.discard(member)
            first_s = self._firsts_s.get(member, 0.0)
            is_steady = now_s - self._joined_s.get(member, -math.inf) >= STEADY * first_s
            self._firsts_s[member] = FIRST_S if is_steady else min(2 * first_s, LONGEST_S)
            self._lost_s[member] = now_s
            self._due_s[member] = now_s + self._firsts_s[member]

    def join(self, cluster: Cluster) -> None:
        """Note that the members of a cluster are in use. Others that were back are lost again, with
        their hosts."""
        away = self._back.difference(cluster.ids)
        self._joined_s |= dict.fromkeys(self._back - away, time.monotonic())
        self._back.clear()
        self.lose(away)

    def look(self, present: Cluster) -> bool:
        """Continue to look for lost members. Return whether one has come back now."""
        silent = _silent_hosts(present)
        self.lose([id for id in self._back if self._cluster.member(id).host in silent])
        if self._trial is not None:
            return self._end_trial(*self._trial)
        now_s = time.monotonic()
        due = [
            member
            for member, due_s in self._due_s.items()
            if due_s <= now_s and self._cluster.member(member).host not in silent
        ]
        if due:
            alone = without(self._cluster, {*self._cluster.ids} - {due[0]})
            try:
                workers = Workers.start(alone, wait=False)
                workers.be_quiet()
                if doors := self._doors(due[0], present):
                    workers.begin_each("hetpipe.hosts.door:reach", {due[0]: (doors,)})
                self._trial = due[0], workers, now_s
            except HetpipeError:  # the system or the host no longer knows the device
                self._wait(due[0])
        return False

    def close(self) -> None:
        """End the worker of a look that is under way."""
        if self._trial is not None:
            _, workers, _ = self._trial
            self._trial = None
            with suppress(HetpipeError):
                workers.close()

    def _end_trial(self, member: str, workers: Workers, begin_s: float) -> bool:
        """Return whether the member is back. A worker that does not open its device in `OPEN_S` is
        ended."""
        try:
            if not workers.have_replied:
                if time.monotonic() - begin_s > OPEN_S:
                    self._wait(member)
                    self.close()
                return False
        except HetpipeError:
            self._wait(member)
        else:
            del self._due_s[member]
            self._back.add(member)
        self.close()
        return member in self._back

    def _doors(self, member: str, present: Cluster) -> list[tuple[str, int]]:
        """Return where the other hosts in use receive wires from a member's host."""
        hosts = self._cluster.connections
        if hosts is None:
            return []
        used = (*present.members, *map(self._cluster.member, self._back))
        host = self._cluster.member(member).host
        names = {other.host for other in used} - {host}
        return [hosts.route(host, name)[0] for name in sorted(names)]

    def _wait(self, member: str) -> None:
        now_s = time.monotonic()
        wait_s = max(self._firsts_s[member], GROWTH * (now_s - self._lost_s[member]))
        self._due_s[member] = now_s + min(wait_s, LONGEST_S)


def _silent_hosts(present: Cluster) -> list[str]:
    """Return the names of the lost hosts."""
    hosts = present.connections
    return [] if hosts is None else [host.name for host in hosts.others.values() if host.lost]
