"""The hosts of a cluster, as the controller sees them."""

from __future__ import annotations

import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from hetpipe.errors import ClusterError, HetpipeError, WorkerError
from hetpipe.hosts.connection import Address, Connection
from hetpipe.hosts.door import Door
from hetpipe.hosts.facts import Facts
from hetpipe.hosts.tls import TlsStream
from hetpipe.hosts.wires import Wires
from hetpipe.packing import Packed

logger = logging.getLogger("hetpipe")

HOST = -1
"""The worker in the address of a message to a host itself."""


@dataclass(frozen=True)
class Ask:
    """A request to an agent, which sends an `Answer` with the same number."""

    number: int
    request: Any


@dataclass(frozen=True)
class Run:
    """To an agent: call a function of hetpipe; the answer is its result."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class RunEach:
    """To an agent: call a generator of hetpipe; each value is an answer with `more`."""

    function: Callable[..., Iterator[Any]]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Answer:
    """The result of a request, or its error. With `more`, further answers follow."""

    number: int
    value: Any = None
    error: HetpipeError | None = None
    more: bool = False


@dataclass(frozen=True)
class Goodbye:
    """The controller needs this agent no longer; `failed` says that an error ended it."""

    failed: bool


class RemoteHost:
    """A host with an agent, and the connection to it."""

    def __init__(self, stream: TlsStream, facts: Facts, door: tuple[str, int]) -> None:
        """`door` is the address where the host receives wires."""
        self.facts, self.door = facts, door
        self.address = stream.socket.getsockname()[0]  # ours, as this host reaches us
        self.crews: dict[int, CrewEnd] = {}
        self.lost = ""
        self.on_lost: Callable[[], None] = lambda: None
        self._numbers = itertools.count(1)
        self._answers: dict[int, SimpleQueue[Answer]] = {}
        self.connection = Connection(stream, facts.name)
        self.connection.start(self._arrived, self._ended)

    @property
    def name(self) -> str:
        return self.facts.name

    def begin(self, request: Any) -> Callable[[float], Any]:
        """Send a request. Return a function that waits up to some seconds for its result.

        The function raises the agent's `HetpipeError`, and `WorkerError` for a lost or late host.
        """
        number = next(self._numbers)
        answers = self._answers[number] = SimpleQueue()
        self.send(Address(0, HOST), Ask(number, request))

        def finish(limit_s: float) -> Any:
            try:
                answer = answers.get(timeout=limit_s)
            except Empty:
                raise WorkerError(
                    f"host {self.name!r} has not answered {type(request).__name__} within "
                    f"{limit_s:.0f} s"
                ) from None
            finally:
                del self._answers[number]
            if answer.error is not None:
                raise answer.error
            return answer.value

        return finish

    def iterate(self, request: RunEach) -> Iterator[Any]:
        """Yield the values of a request as they come; it has no time limit.

        Raises the agent's `HetpipeError`, and `WorkerError` for a lost host.
        """
        number = next(self._numbers)
        answers = self._answers[number] = SimpleQueue()
        try:
            self.send(Address(0, HOST), Ask(number, request))
            while True:
                answer = answers.get()
                if answer.error is not None:
                    raise answer.error
                if not answer.more:
                    return
                yield answer.value
        finally:
            del self._answers[number]

    def send(self, address: Address, message: Any) -> None:
        """Send a message to a worker or to the agent. Raises `WorkerError` if the host is lost."""
        try:
            self.connection.send(address, message)
        except OSError as error:
            raise WorkerError(self.describe_loss(str(error))) from error

    def describe_loss(self, reason: str) -> str:
        return f"host {self.name!r} ({self.door[0]}) is lost: {self.lost or reason}"

    def _arrived(self, address: Address, message: Packed) -> None:
        if address.crew == 0:
            answer = self._named(message.unpack())
            if (answers := self._answers.get(answer.number)) is not None:
                answers.put(answer)
        elif (crew := self.crews.get(address.crew)) is not None:
            crew.arrived(address.worker, message.unpack())

    def _named(self, answer: Answer) -> Answer:
        """Return an answer whose error names the host."""
        if (error := answer.error) is None:
            return answer
        return replace(answer, error=type(error)(f"host {self.name!r}: {error}"))

    def _ended(self, reason: str) -> None:
        self.lost = reason
        error = WorkerError(self.describe_loss(reason))
        for number, answers in list(self._answers.items()):
            answers.put(Answer(number, error=error))
        for crew in list(self.crews.values()):
            crew.lost(str(error))
        if not self.crews:
            logger.warning("%s", error)
        self.on_lost()


class CrewEnd(Protocol):
    """Receives the messages of a host's workers that belong to one crew."""

    def arrived(self, worker: int, message: Any) -> None: ...

    def lost(self, reason: str) -> None: ...


class Hosts:
    """The controller's own host and the hosts of its agents; at its end the agents are told so."""

    def __init__(
        self, own: Facts, door: Door, wires: Wires, secret: bytes, others: Sequence[RemoteHost]
    ) -> None:
        """`others` grows when a lost host returns."""
        self.own, self.door, self.wires, self.secret = own, door, wires, secret
        self._others = others
        self._crews = itertools.count(1)
        self._owner = os.getpid()
        self._finalize = weakref.finalize(self, _close, self._owner, door, others)

    @property
    def others(self) -> dict[str, RemoteHost]:
        """The other hosts by name: each as it came last, and perhaps lost."""
        return {other.name: other for other in self._others}

    def close(self) -> None:
        """Tell the agents that they are needed no longer, or that the present error ends them. Does
        nothing in a fork of the process."""
        if self._finalize.detach() is not None and self._owner == os.getpid():
            self.door.close()
            # Not by `last_value`: in a notebook it may be an error of long ago.
            dismiss([*self.others.values()], failed=sys.exc_info()[1] is not None)

    def new_crew(self) -> int:
        """Return a number for a crew."""
        return next(self._crews)

    @property
    def facts(self) -> list[Facts]:
        """The facts of all hosts, first the controller's."""
        return [self.own, *(other.facts for other in self.others.values())]

    def call_all(
        self, limit_s: float, function: Callable[..., Any], *arguments: Any
    ) -> dict[str, Any]:
        """Call a function of hetpipe on all hosts at once; return the results by host.

        Raises the error of a host, and `WorkerError` for a lost or late one.
        """
        return self.call_each(limit_s, function, {facts.name: arguments for facts in self.facts})

    def call_each(
        self, limit_s: float, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Do the same as `call_all`, on the hosts of `arguments`, with other arguments on each."""
        finishes = {
            name: self.others[name].begin(Run(function, given))
            for name, given in arguments.items()
            if name != self.own.name
        }
        own = arguments.get(self.own.name)
        results = {} if own is None else {self.own.name: function(*own)}
        return results | {name: finish(limit_s) for name, finish in finishes.items()}

    def iterate(
        self, host: str, function: Callable[..., Iterator[Any]], *arguments: Any
    ) -> Iterator[Any]:
        """Yield the values of a generator of hetpipe that runs on a host, as they come."""
        if host == self.own.name:
            return function(*arguments)
        return self.others[host].iterate(RunEach(function, arguments))

    def route(self, source: str, target: str) -> tuple[tuple[str, int], float]:
        """Return where host `target` receives wires from host `source`, and how far the target's
        clock is ahead of the source's, in seconds."""
        ahead_s = self._ahead_s(target) - self._ahead_s(source)
        if target != self.own.name:
            return self.others[target].door, ahead_s
        address = self.others[source].address
        return (address, self.door.port_at(address)), ahead_s

    def near(self, source: str, target: str) -> bool:
        """Return whether the processes of two hosts can share memory."""
        memories = {facts.memory for facts in self.facts if facts.name in (source, target)}
        return len(memories) == 1 and "" not in memories

    def _ahead_s(self, name: str) -> float:
        return 0.0 if name == self.own.name else self.others[name].connection.clock.ahead_s

    @property
    def clock_error_s(self) -> float:
        """The greatest error, in seconds, of a time that another host's clock gave."""
        clocks = [host.connection.clock for host in self.others.values() if not host.lost]
        return max([clock.error_s for clock in clocks], default=0.0)

    def __reduce__(self) -> Any:
        raise HetpipeError("connections to hosts cannot be pickled or copied")


def _close(owner: int, door: Door, others: Sequence[RemoteHost]) -> None:
    if os.getpid() != owner:  # a fork, which shares the connections
        return
    door.close()
    # Python sets `last_value` before it ends by an error, and the command line before others.
    dismiss(others, failed=bool(sys.exc_info()[1] or getattr(sys, "last_value", None)))


def dismiss(others: Sequence[RemoteHost], *, failed: bool) -> None:
    """Tell agents that they are needed no longer, and close the connections."""
    for other in others:
        other.connection.expect_end()  # the agent may close its end before we close ours
        with suppress(WorkerError):
            other.send(Address(0, HOST), Goodbye(failed))
        other.connection.close()


class Gathering:
    """Agents that have called, until all are there."""

    def __init__(self) -> None:
        self.all: list[RemoteHost] = []
        """In the order of their calls; some may be lost by now."""
        # Held while the list changes; the waiting thread is woken for each agent.
        self._changed = threading.Condition()

    def add(self, meet: Callable[[list[str]], RemoteHost]) -> None:
        """Add the host that `meet` returns for the names of the present ones."""
        with self._changed:
            self.all.append(meet(self.names))
            self._changed.notify_all()

    @property
    def others(self) -> list[RemoteHost]:
        return [other for other in self.all if not other.lost]

    @property
    def names(self) -> list[str]:
        return [other.name for other in self.others]

    def wait(
        self, count: int, limit_s: float, door: Door, names: Sequence[str] = ()
    ) -> list[RemoteHost]:
        """Wait for `count` agents at a door. Return the list that gets the hosts of later calls.

        Raises `ClusterError` with the names that came in time, the others of `names`, and the
        callers that were refused.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.others) >= count, limit_s):
                came = ", ".join(sorted(self.names)) or "none"
                absent = ", ".join(name for name in names if name not in self.names)
                few = f"remove {absent} from the cluster" if absent else "give a smaller count"
                refused = "".join(f"; {caller}" for caller in door.refused[:3])
                raise ClusterError(
                    f"{len(self.others)} of {count} other hosts have come within {limit_s:.0f} s "
                    f"({came}): start an agent on each of the others, or {few}"
                    f"{refused}"
                )
            self.all[:] = sorted(self.others, key=lambda other: other.name)
            return self.all
