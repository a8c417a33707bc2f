"""Workers on several hosts, as one fleet."""

from __future__ import annotations

import itertools
import mmap
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hetpipe.crew.control import Control
from hetpipe.crew.fleet import LEAVE_S, Fleet
from hetpipe.errors import WorkerError
from hetpipe.hosts.connection import Address
from hetpipe.hosts.hosts import HOST, Ask, Hosts, RemoteHost
from hetpipe.wire.ends import Route, WireEnd
from hetpipe.wire.host_messages import Connect, Failed, Launch, Leave
from hetpipe.wire.messages import Reply, StepReport

NO_ANSWER = 0
"""The number of a request that an agent does not answer."""
LAUNCH_S = 60.0
"""Seconds in which an agent begins to start its workers."""


class ControlPart:
    """The part of a `Control` for the workers of one host."""

    relays = False

    def __init__(self, control: Control, workers: Sequence[int]) -> None:
        self._control, self._workers = control, workers
        self.on_failure: Callable[[], None] = lambda: None

    @property
    def failed(self) -> bool:
        return self._control.failed

    @property
    def owns(self) -> bool:
        return self._control.owns

    def label(self, worker: int) -> str:
        return self._control.label(self._workers[worker])

    def doing_of(self, worker: int) -> str:
        return self._control.doing_of(self._workers[worker])

    def arrived(self, worker: int, message: Any) -> None:
        self._control.arrived(self._workers[worker], message)

    def fail(self, text: str, trace: str = "", lost: Collection[int] = ()) -> None:
        self._control.fail(text, trace, [self._workers[worker] for worker in lost])

    def fail_all(self, text: str) -> None:
        """Report that the host is lost, with all its workers."""
        self._control.fail(text, lost=self._workers)

    def check(self) -> None:
        self._control.check()

    def await_failure(self, worker: int, limit_s: float) -> None:
        self._control.await_failure(self._workers[worker], limit_s)


class RemoteFleet(Fleet):
    """The workers of one crew on another host, whose agent starts and watches them."""

    def __init__(self, control: ControlPart, host: RemoteHost, launch: Launch) -> None:
        self.control = self._part = control
        control.on_failure = self._leave
        self._host, self._crew = host, launch.crew
        host.crews[launch.crew] = self
        self._launched: Callable[[float], Any] = lambda limit_s: None
        try:
            self._launched = host.begin(launch)
        except WorkerError as error:
            self.lost(str(error))

    def wait(self) -> None:
        """Wait until the agent has begun to start the workers. Raises its `HetpipeError`.

        The loss of the host is a failure of the crew.
        """
        try:
            self._launched(LAUNCH_S)
        except WorkerError as error:
            self.lost(str(error))

    def send(self, worker: int, message: Any) -> None:
        self._send(Address(self._crew, worker), message)

    def connect(self, worker: int, ends: Sequence[WireEnd]) -> None:
        self._send(Address(0, HOST), Ask(NO_ANSWER, Connect(self._crew, worker, ends)))

    def _send(self, address: Address, message: Any) -> None:
        self.control.check()
        try:
            self._host.send(address, message)
        except WorkerError as error:
            self.lost(str(error))
            self.control.check()

    def arrived(self, worker: int, message: Any) -> None:
        if isinstance(message, Failed):
            text = f"host {self._host.name!r}: {message.text}"
            self.control.fail(text, message.trace, message.lost)
            return
        if isinstance(message, Reply) and isinstance(message.value, StepReport):
            message = Reply(_shifted(message.value, -self._host.connection.clock.ahead_s))
        self.control.arrived(worker, message)

    def lost(self, reason: str) -> None:
        self._part.fail_all(reason)

    def begin_close(self) -> Callable[[], None]:
        """Ask the agent to end the workers. Return a function that waits until they have ended."""
        try:
            finish = self._host.begin(Leave(self._crew))
        except WorkerError:  # the agent is gone, and its workers with it
            return self._forget

        def wait() -> None:
            with suppress(WorkerError):
                finish(2 * LEAVE_S)
            self._forget()

        return wait

    def close(self) -> None:
        self.begin_close()()

    def _leave(self) -> None:
        with suppress(WorkerError):
            self._host.send(Address(0, HOST), Ask(NO_ANSWER, Leave(self._crew)))

    def _forget(self) -> None:
        self._host.crews.pop(self._crew, None)


def _shifted(report: StepReport, by_s: float) -> StepReport:
    """Return a report with its times on another clock."""
    spans = [(*span[:4], span[4] + by_s, span[5] + by_s) for span in report.spans]
    return replace(report, spans=spans)


class HostsFleet(Fleet):
    """The workers of a cluster of several hosts, by the order of the cluster's members."""

    def __init__(self, control: Control, hosts: Hosts, places: Sequence[str]) -> None:
        """`places[n]` is the host of worker n. `add` gives each host's part."""
        self.control = control
        self._hosts, self._places = hosts, places
        self._numbers = [places[:n].count(host) for n, host in enumerate(places)]
        self._parts: dict[str, Fleet] = {}
        self._controls = {host: ControlPart(control, self.workers(host)) for host in {*places}}
        self._wires = itertools.count(1)
        self.wires = secrets.token_hex(8)
        hosts.wires.open(self.wires)
        control.places, control.own_host = places, hosts.own.name
        control.hosts_answer = self._hosts_answer
        control.on_failure = self._failed

    def workers(self, host: str) -> list[int]:
        """Return the numbers of a host's workers."""
        return [n for n, place in enumerate(self._places) if place == host]

    def add(self, host: str, start: Callable[[ControlPart], Fleet]) -> None:
        """Start the workers of a host."""
        self._parts[host] = start(self._controls[host])

    def wait(self) -> None:
        """Wait until all agents have begun to start their workers. Raises their errors."""
        for part in self._parts.values():
            if isinstance(part, RemoteFleet):
                part.wait()

    def send(self, worker: int, message: Any) -> None:
        self._parts[self._places[worker]].send(self._numbers[worker], message)

    def lend(self, worker: int, number: int, nbytes: int) -> mmap.mmap | None:
        return self._parts[self._places[worker]].lend(self._numbers[worker], number, nbytes)

    def connect(self, worker: int, ends: Sequence[WireEnd]) -> None:
        self._parts[self._places[worker]].connect(self._numbers[worker], ends)

    def route(self, source: int, target: int) -> Route | None:
        one, other = self._places[source], self._places[target]
        if one == other:
            return None
        address, ahead_s = self._hosts.route(one, other)
        near = self._hosts.near(one, other)
        return Route(f"{self.wires}/{next(self._wires)}", address, ahead_s, near)

    def close(self) -> None:
        if not self.control.owns:
            return
        remote = [part for part in self._parts.values() if isinstance(part, RemoteFleet)]
        waits = [part.begin_close() for part in remote]
        for part in self._parts.values():
            if not isinstance(part, RemoteFleet):
                part.close()
        for wait in waits:
            wait()
        self._hosts.wires.forget(self.wires)

    def _hosts_answer(self, hosts: Collection[str]) -> bool:
        """Wait for an answer of each host. Return False if one is lost: its loss ends the wait."""
        does_nothing = bool
        try:
            self._hosts.call_each(threading.TIMEOUT_MAX, does_nothing, dict.fromkeys(hosts, ()))
        except WorkerError:
            return False
        return True

    def _failed(self) -> None:
        for part in self._controls.values():
            part.on_failure()
