"""The agent: the process that starts and watches a host's workers for a controller elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, NamedTuple, TextIO

from hetpipe.cluster.transports import transport_of
from hetpipe.crew.fleet import Fleet
from hetpipe.crew.launcher import Timing, labels_of, launch_here
from hetpipe.crew.plugboard import Outside, Plugboard
from hetpipe.errors import HetpipeError, WorkerError
from hetpipe.hosts.connection import Address, Connection
from hetpipe.hosts.door import Door, Greeting, Visitor
from hetpipe.hosts.facts import Facts, own_facts
from hetpipe.hosts.hosts import HOST, Answer, Ask, Goodbye, Run, RunEach
from hetpipe.hosts.meeting import CONTROL, WIRE, call, is_loopback
from hetpipe.hosts.secret import find_secret
from hetpipe.hosts.tls import TlsStream
from hetpipe.hosts.wires import Wires
from hetpipe.packing import Packed
from hetpipe.wire.host_messages import Connect, Failed, Launch, Leave
from hetpipe.worker.blame import summary, trace_of


def serve_once(address: tuple[str, int], name: str, limit_s: float) -> int:
    """Serve the controller at an address until it needs this host no longer.

    Return the exit status: 0, or 1 if the controller is lost. Raises `ClusterError` if it does not
    answer within `limit_s`, or refuses this host.
    """
    secret, wires = find_secret(loopback=is_loopback(address[0])), Wires()
    stream, controller, door = call(address, secret, own_facts(name), wires, limit_s)
    try:
        reason = Agent(stream, controller, Outside(wires, secret)).serve()
    finally:
        door.close()
    return 1 if reason else 0


def stay(address: tuple[str, int], name: str) -> None:
    """Listen on an address, and serve one controller after another. Raises `ClusterError`."""
    secret, facts, wires = find_secret(loopback=is_loopback(address[0])), own_facts(name), Wires()
    visits: SimpleQueue[tuple[TlsStream, Facts]] = SimpleQueue()
    served: list[Facts] = []  # the present controller

    def check(greeting: Greeting) -> str:
        if served:
            host = served[0].name
            return f"this agent works for host {host!r} now; try again when that training ends"
        return ""

    def visit(stream: TlsStream, greeting: Greeting) -> None:
        served.append(greeting.facts)
        visits.put((stream, greeting.facts))

    visitors = {CONTROL: Visitor(check, visit), WIRE: wires.visitor}
    door = Door(address, secret, facts, visitors)
    _say(f"{facts.name} listens on {door.address[0]} port {door.address[1]}")
    try:
        while True:
            stream, controller = visits.get()
            _say(f"works for {controller.name}")
            try:
                reason = Agent(stream, controller, Outside(wires, secret)).serve()
            except Exception as error:
                reason = summary(error)
            finally:
                stream.close()  # nobody has closed it if the agent could not begin
            _say(f"no longer works for {controller.name}{reason and ': '}{reason}")
            served.clear()
    finally:
        door.close()


def _say(line: str, file: TextIO | None = None) -> None:
    """Print a line, unless the disk with the agent's log is full."""
    with suppress(OSError):
        print(line, file=file, flush=True)


SOON_S = 0.5
"""Seconds in which an agent reads the last messages, unless it is busy."""


class _End(NamedTuple):
    """The connection has ended."""

    reason: str


class Agent:
    """Serves one controller."""

    def __init__(self, stream: TlsStream, controller: Facts, outside: Outside) -> None:
        self._outside = outside
        self._arrived: SimpleQueue[tuple[Address, Packed] | _End] = SimpleQueue()
        self._crews: dict[int, tuple[Fleet, str]] = {}  # with the name that its wires have
        self._obeyed = threading.Event()
        self._told = False  # whether the loss of the controller has been told
        self._connection = Connection(stream, controller.name)
        self._connection.start(
            lambda address, message: self._arrived.put((address, message)), self._ended
        )

    def serve(self) -> str:
        """Obey the controller. Return why it is lost, or "" once it has said goodbye.

        No worker runs afterwards.
        """
        try:
            reason = self._obey()
            self._obeyed.set()
            if reason and not self._told:
                self._tell_loss(reason)
            return reason
        finally:
            for crew in [*self._crews]:
                self._leave(Leave(crew))
            self._connection.close()

    def _obey(self) -> str:
        while not isinstance(item := self._arrived.get(), _End):
            address, message = item
            if address.crew:
                self._pass_on(address, message)
            elif isinstance(asked := message.unpack(), Goodbye):
                return "an error ended it" if asked.failed else ""
            else:
                self._answer(asked)
        for fleet, _ in self._crews.values():
            fleet.control.fail(item.reason)  # its workers may wait for a lost host for ever
        return item.reason

    def _ended(self, reason: str) -> None:
        """Note the end. Tell it as a loss if the main thread is busy: it may import torch for
        seconds. Otherwise it first reads the last messages, perhaps a goodbye."""
        self._arrived.put(_End(reason))
        if not self._obeyed.wait(SOON_S):
            self._told = True
            self._tell_loss(reason)

    def _tell_loss(self, reason: str) -> None:
        name = self._connection.peer
        _say(f"hetpipe: the controller {name!r} is lost: {reason}", sys.stderr)

    def _pass_on(self, address: Address, message: Packed) -> None:
        self._tell(address, lambda fleet: fleet.send(address.worker, message))

    def _tell(self, address: Address, tell: Callable[[Fleet], None]) -> None:
        """Tell a worker something. An error ends the crew, since nobody awaits an answer."""
        if address.crew not in self._crews:
            return  # it has ended, and the controller knows
        try:
            tell(self._crews[address.crew][0])
        except WorkerError:
            pass  # the crew has failed, and the controller knows
        except Exception as error:
            failed = Failed(summary(error), trace_of(error), (address.worker,))
            self._send(Address(address.crew, HOST), failed)

    def _answer(self, asked: Ask) -> None:
        request = asked.request
        try:
            if isinstance(request, RunEach):
                answer = self._run_each(asked.number, request)
            else:
                answer = Answer(asked.number, _REQUESTS[type(request)](self, request))
        except HetpipeError as error:
            answer = Answer(asked.number, error=error)
        except Exception as error:
            answer = Answer(asked.number, error=HetpipeError(summary(error)))
        if asked.number:
            self._send(Address(0, HOST), answer)

    def _send(self, address: Address, message: Any) -> None:
        with suppress(OSError):  # the connection's thread says why
            self._connection.send(address, message)

    def _run(self, request: Run) -> Any:
        return request.function(*request.arguments)

    def _run_each(self, number: int, request: RunEach) -> Answer:
        """Answer with each value; return the last answer. Raises `OSError` for a lost controller,
        so nothing runs on for it."""
        for value in request.function(*request.arguments):
            self._connection.send(Address(0, HOST), Answer(number, value, more=True))
        return Answer(number)

    def _launch(self, request: Launch) -> None:
        timing = Timing(request.heartbeat_s, request.silence_s, request.start_timeout_s)
        plugboard = Plugboard(transport_of(request.cluster.transport), self._outside)
        relay = Relay(
            labels_of(request.cluster),
            lambda worker, m: self._send(Address(request.crew, worker), m),
        )
        fleet = launch_here(request.cluster, relay, timing, plugboard, request.sharing)
        self._outside.wires.open(request.wires)
        self._crews[request.crew] = fleet, request.wires

    def _connect(self, request: Connect) -> None:
        address = Address(request.crew, request.worker)
        self._tell(address, lambda fleet: fleet.connect(request.worker, request.ends))

    def _leave(self, request: Leave) -> None:
        fleet, wires = self._crews.pop(request.crew, (None, ""))
        if fleet is not None:
            fleet.close()
            self._outside.wires.forget(wires)


class Relay:
    """Passes on the reports about a host's workers to the controller."""

    relays = True

    def __init__(self, labels: list[str], send: Callable[[int, Any], None]) -> None:
        self.on_failure: Callable[[], None] = lambda: None
        self.failed, self.owns = False, True
        self._labels, self._send = labels, send

    def label(self, worker: int) -> str:
        return self._labels[worker]

    def doing_of(self, worker: int) -> str:
        return "idle"

    def arrived(self, worker: int, message: Packed) -> None:
        self._send(worker, message)

    def fail(self, text: str, trace: str = "", lost: Collection[int] = ()) -> None:
        if not self.failed:
            self.failed = True
            self._send(HOST, Failed(text, trace, tuple(lost)))
            self.on_failure()

    def check(self) -> None:
        if self.failed:
            raise WorkerError("this host's part of the crew has failed")

    def await_failure(self, worker: int, limit_s: float) -> None:
        """Return at once: the watcher reports the failure."""


_REQUESTS: dict[type, Callable[[Agent, Any], Any]] = {
    Run: Agent._run,
    Launch: Agent._launch,
    Connect: Agent._connect,
    Leave: Agent._leave,
}
