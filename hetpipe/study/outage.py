"""Trainings in which devices fail and are repaired, by discrete events.

Between two events a training makes mini-batches at a constant rate, and copies its state after
every `updates` of them. The events are failures and repairs, drawn once, so that all policies meet
the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Devices = NDArray[np.intp]
"""Numbers of devices."""
Lost = NDArray[np.bool_]
"""For each device, whether the training is without it."""

ROUNDING = 1e-9
"""The part of a mini-batch below which one counts as complete."""


class Event(NamedTuple):
    """A moment at which devices fail, or are repaired."""

    time_s: float
    devices: Devices
    fail: bool


@dataclass(frozen=True)
class Failures:
    """How often a cluster's devices fail, and how long repairs take.

    Each failure takes a device or, with the chance `host_share`, all devices of a host. One device
    is as likely as another, and one host as another, whatever its size. Distances between failures,
    and repairs, are exponentially distributed.
    """

    per_s: float  # of the whole cluster
    repair_s: float  # on average
    host_share: float
    hosts: Sequence[Devices]

    @property
    def mtbf_s(self) -> float:
        """The mean time between two failures of the cluster."""
        return 1 / self.per_s if self.per_s else math.inf

    def events(self, horizon_s: float, seed: int) -> list[Event]:
        """Return the events until `horizon_s`, in order."""
        return sorted(self._drawn(horizon_s, seed), key=lambda event: event.time_s)

    def _drawn(self, horizon_s: float, seed: int) -> Iterator[Event]:
        chance = np.random.default_rng(seed)
        alone = [np.array([device]) for host in self.hosts for device in host]
        places = math.lcm(len(alone), len(self.hosts))  # a multiple of both counts
        for time_s in chance.uniform(0.0, horizon_s, chance.poisson(self.per_s * horizon_s)):
            place = int(chance.integers(places))
            failing = self.hosts if chance.random() < self.host_share else alone
            devices = failing[place * len(failing) // places]
            yield Event(time_s, devices, True)
            yield Event(time_s + chance.exponential(self.repair_s), devices, False)


@dataclass(frozen=True)
class Policy:
    """A training's answer to failures."""

    name: str
    rate: Callable[[Lost], float]  # mini-batches per second without these devices
    updates: float  # between two copies; infinite: no copies
    copy_s: float  # for which a copy holds the training up
    pause_s: float  # after a failure that loses no copied or finished mini-batch
    restart_s: float  # after a failure that goes back to the last copy
    join_s: float  # for which repaired devices hold the training up when they join
    goes_back: bool  # after each failure; if not, only when too few devices remain


@dataclass
class Spent:
    """The mini-batches that a training made, and the seconds that it spent on other things."""

    mini_batches: float = 0.0  # without the lost ones
    repeated_s: float = 0.0  # for mini-batches that were lost
    copies_s: float = 0.0
    pauses_s: float = 0.0


class Run:
    """A training under one policy."""

    def __init__(self, policy: Policy, failures: Failures) -> None:
        self.policy = policy
        self.mtbf_s = failures.mtbf_s
        count = sum(map(len, failures.hosts))
        self.failed = np.zeros(count, int)  # failures of each device that are not repaired
        self.without: Lost = np.zeros(count, bool)  # devices that take no part
        self.rate = policy.rate(self.without)
        self.now_s = self.resumes_s = 0.0
        self.spent = Spent()
        self.since = 0.0  # mini-batches since the last copy
        self.copying_s = 0.0  # of the copy under way

    def until(self, horizon_s: float, events: Sequence[Event]) -> Spent:
        """Return what the training has made and spent at `horizon_s`."""
        for event in events:
            if event.time_s >= horizon_s:
                break
            self._wait(event.time_s)
            self.failed[event.devices] += 1 if event.fail else -1
            if event.fail and not self.without[event.devices].all():
                self._fail()
        self._wait(horizon_s)
        return self.spent

    def _fail(self) -> None:
        """Lose what the policy loses, and pause; repaired devices join without another pause."""
        rate = self.rate
        self._use(self.failed > 0)
        back = self.policy.goes_back or not self.rate
        lost = self.since - (0.0 if back else math.floor(self.since + ROUNDING))
        if lost:
            self.spent.mini_batches -= lost
            self.spent.repeated_s += lost / rate
        self.since, self.copying_s = self.since - lost, 0.0
        self.resumes_s = self.now_s + (self.policy.restart_s if back else self.policy.pause_s)

    def _use(self, without: Lost) -> None:
        self.without, self.rate = without, self.policy.rate(without)

    def _wait(self, until_s: float) -> None:
        """Pause or train until a moment; repaired devices join if that pays."""
        while self.now_s < until_s:
            if self.now_s < self.resumes_s:
                end_s = min(self.resumes_s, until_s)
                self.spent.pauses_s += end_s - self.now_s
                self.now_s = end_s
            elif not self._join():
                self._train(until_s - self.now_s)
                self.now_s = until_s

    def _join(self) -> bool:
        """Let repaired devices join if more is done until the next failure, on average."""
        failed = self.failed > 0
        if np.count_nonzero(failed) == np.count_nonzero(self.without):
            return False
        rate = self.policy.rate(failed)
        pause_s = self.policy.join_s if self.rate else self.policy.restart_s
        pays = rate * (self.mtbf_s - pause_s) > self.rate * self.mtbf_s
        if not (pays if self.rate else rate):
            return False
        self.resumes_s = self.now_s + pause_s
        self._use(failed)
        return True

    def _train(self, time_s: float) -> None:
        """Make mini-batches and copies."""
        if not self.rate:
            return
        policy, made, rest_s = self.policy, 0.0, time_s
        left_s = (policy.updates - self.since) / self.rate + policy.copy_s - self.copying_s
        if rest_s >= left_s:
            cycle_s = policy.updates / self.rate + policy.copy_s
            cycles, rest_s = divmod(rest_s - left_s, cycle_s)
            made = (1 + cycles) * policy.updates - self.since
            self.since = self.copying_s = 0.0
        work_s = min(rest_s, (policy.updates - self.since) / self.rate)
        self.since += work_s * self.rate
        self.copying_s += rest_s - work_s
        made += work_s * self.rate
        self.spent.mini_batches += made
        self.spent.copies_s += time_s - made / self.rate
