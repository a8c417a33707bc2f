"""The port on which a host listens, for the control connection and for wires.

    the host that dials                     the host that listens
    connect ------------------------------> accept
    <===== TLS handshake with the secret ===>
    greeting (JSON) ----------------------> check version and purpose
    <------------------------------- answer (JSON)

After the answer a control connection stays encrypted. A wire's socket goes to its worker: plain, or
for another handshake if the wire is encrypted too.
"""

from __future__ import annotations

import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from hetpipe.errors import ClusterError
from hetpipe.hosts.facts import Facts, parse_record, problem_of_name
from hetpipe.hosts.tls import HANDSHAKE_S, RefusedError, TlsStream, shut, tls_context
from hetpipe.sockets import connected
from hetpipe.words import short

logger = logging.getLogger("hetpipe")

MOST_HANDSHAKES = 64
"""Connections that may be in their handshake at the same time. A further one ends the oldest."""
MOST_NBYTES = 64 * 1024
"""Bytes of the longest greeting."""
MOST_REFUSED = 64
"""Refusals that a door tells."""
FULL_S = 0.05
"""Seconds until the next try if the system gives no connection, for instance for want of files."""
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Call:
    """The purpose of a connection, and more for it.

    `door` is the port where the host that calls receives wires, `rank` its rank under torchrun.
    """

    purpose: str
    wire: str = ""
    door: int = 0
    rank: int = 0


class Greeting(NamedTuple):
    """A host's first message."""

    call: Call
    facts: Facts


class Visitor(NamedTuple):
    """Receives connections for one purpose.

    `check` returns why a greeting is refused, or "". Then `visit` takes over the connection. No
    other greeting is checked between the two.
    """

    check: Callable[[Greeting], str]
    visit: Callable[[TlsStream, Greeting], None]


class Door:
    """Listens on an address for hosts with the secret. `visitors` are by purpose.

    Each refusal of a host is a warning, once for each caller and reason.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        facts: Facts,
        visitors: Mapping[str, Visitor],
    ) -> None:
        """Raises `ClusterError` if the address cannot be used, or a package is missing."""
        self._secret, self._facts, self._visitors = secret, facts, visitors
        tls_context(secret, server=True)
        self._servers: dict[str, socket.socket] = {}  # by the address of this host
        self._shaking: dict[socket.socket, None] = {}  # connections in their handshake
        # Held while `_shaking` or `_refused` changes; never while a socket waits.
        self._changing = threading.Lock()
        # Held from the check of a greeting until its visitor has the connection.
        self._admitting = threading.Lock()
        self._refused: dict[str, None] = {}
        self._closing = False
        self._listen(address)

    def listen_at(self, host: str) -> None:
        """Listen at a further address of this host, on a free port. Raises `ClusterError`."""
        if host not in self._servers:
            self._listen((host, 0))
            if self._closing:  # meanwhile
                self.close()

    def _listen(self, address: tuple[str, int]) -> None:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            server = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            raise ClusterError(
                f"this host cannot listen on {address[0]} port {address[1]}: {error.strerror}"
            ) from error
        server.settimeout(None)
        self._servers[address[0]] = server
        threading.Thread(
            target=self._accept, args=(server,), name="hetpipe door", daemon=True
        ).start()

    @property
    def address(self) -> tuple[str, int]:
        """The first address on which this host listens."""
        host, port, *_ = next(iter(self._servers.values())).getsockname()
        return host, port

    def port_at(self, host: str) -> int:
        """Return the port on which this host listens at one of its addresses."""
        server = self._servers.get(host)
        return self.address[1] if server is None else int(server.getsockname()[1])

    @property
    def refused(self) -> list[str]:
        """The refused callers, each with the reason."""
        return [*self._refused]

    def is_closed(self) -> bool:
        """Whether this host listens no longer."""
        return self._closing

    def close(self) -> None:
        self._closing = True
        for server in [*self._servers.values()]:
            shut(server)
        with self._changing:
            for sock in self._shaking:
                _interrupt(sock)

    def _accept(self, server: socket.socket) -> None:
        while not self._closing:
            try:
                sock, (caller, *_) = server.accept()
            except OSError:
                time.sleep(FULL_S)
                continue
            with self._changing:
                if len(self._shaking) == MOST_HANDSHAKES:
                    _interrupt(next(iter(self._shaking)))
                    del self._shaking[next(iter(self._shaking))]
                self._shaking[sock] = None
            thread = threading.Thread(
                target=self._greet, args=(sock, caller), name="hetpipe greeting", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the system has no further thread
                logger.warning("a connection was refused: %s", error)
                self._end_handshake(sock)
                shut(sock)

    def _end_handshake(self, sock: socket.socket) -> None:
        with self._changing:
            self._shaking.pop(sock, None)

    def _tell_refusal(self, text: str) -> None:
        with self._changing:
            if text in self._refused or len(self._refused) == MOST_REFUSED:
                return
            self._refused[text] = None
        logger.warning("%s", text)

    def _greet(self, sock: socket.socket, caller: str) -> None:
        """Answer a greeting. A caller without the secret gets no answer."""
        try:
            sock.settimeout(HANDSHAKE_S)
            try:
                stream = TlsStream(sock, self._secret, server=True)
            finally:
                self._end_handshake(sock)
            if self._admit(stream, _receive(stream), caller):
                return
        except RefusedError as error:
            self._tell_refusal(
                f"a caller from {caller} has another secret, or is no host of hetpipe ({error})"
            )
        except ValueError as error:
            self._tell_refusal(f"a caller from {caller} was refused: {error}")
        except (OSError, EOFError) as error:
            logger.info("a connection from %s was refused: %s", caller, error)
        except Exception:
            logger.exception("a connection was refused")
        shut(sock)

    def _admit(self, stream: TlsStream, message: dict[str, Any], caller: str) -> bool:
        """Answer a greeting; return whether a visitor has the connection."""
        with self._admitting:
            greeting, reason = self._judge(message)
            _send(stream, {"facts": asdict(self._facts), "refused": reason})
            if greeting is None or reason:
                if greeting is None or not greeting.call.wire:  # a wire may outlive its crew
                    self._tell_refusal(f"{_named(message, caller)} was refused: {reason}")
                return False
            stream.socket.settimeout(None)
            self._visitors[greeting.call.purpose].visit(stream, greeting)
            return True

    def _judge(self, message: dict[str, Any]) -> tuple[Greeting | None, str]:
        """Return a greeting, and why it is refused, or ""."""
        if reason := _other_version(message, self._facts):
            return None, reason
        try:
            greeting = _greeting(message)
        except ValueError as error:
            return None, f"this host does not understand the greeting: {error}"
        if self._closing:
            return None, "this host ends now"
        if (visitor := self._visitors.get(greeting.call.purpose)) is None:
            return None, f"this host does not answer {greeting.call.purpose!r}"
        return greeting, visitor.check(greeting)


def dial(
    address: tuple[str, int], secret: bytes, facts: Facts, call: Call
) -> tuple[TlsStream, Facts]:
    """Connect to a door. Return the stream and the facts of the other host.

    Raises `ClusterError` if the other host refuses, and `OSError` if it does not answer.
    """
    place = f"{address[0]} port {address[1]}"
    sock = connected(address, HANDSHAKE_S)
    try:
        stream = TlsStream(sock, secret, server=False)
        _send(stream, {"call": asdict(call), "facts": asdict(facts)})
        theirs, reason = _answer(_receive(stream), facts)
    except RefusedError as error:
        shut(sock)
        raise ClusterError(
            f"{place} has another secret, or is no host of hetpipe ({error})"
        ) from error
    except EOFError as error:  # the server checks our certificate after its own handshake
        shut(sock)
        raise ClusterError(
            f"{place} closed the connection: it has another secret, or is no host of hetpipe "
            f"({error})"
        ) from error
    except ValueError as error:
        shut(sock)
        raise ClusterError(f"{place} gives an answer that is no host's: {error}") from error
    except OSError:
        shut(sock)
        raise
    if reason:
        shut(sock)
        raise ClusterError(f"{theirs.name} refuses: {reason}")
    sock.settimeout(None)
    return stream, theirs


def reach(device: object, addresses: Sequence[tuple[str, int]]) -> None:
    """In a worker: connect to doors. Raises `OSError` if one does not answer."""
    for address in addresses:
        connected(address, HANDSHAKE_S).close()


def _other_version(message: dict[str, Any], ours: Facts) -> str:
    """Return that a host has another version, or "". Its other facts may have another form."""
    facts = message.get("facts")
    theirs = facts.get("hetpipe") if isinstance(facts, dict) else None
    if not isinstance(theirs, str) or theirs == ours.hetpipe:
        return ""
    return (
        f"the caller has hetpipe {short(theirs)}, and the host that it calls {ours.hetpipe}: "
        "install one version"
    )


def _named(message: dict[str, Any], caller: str) -> str:
    """Return the name and address of a host. Its facts may have another form."""
    facts = message.get("facts")
    name = facts.get("name") if isinstance(facts, dict) else None
    if not isinstance(name, str) or problem_of_name(name):
        return f"a caller from {caller}"
    return f"host {name!r} ({caller})"


def _greeting(message: dict[str, Any]) -> Greeting:
    """Return a greeting. Raises `ValueError`."""
    call = parse_record(Call, message.get("call"))
    if not 0 <= call.door <= 65535:
        raise ValueError(f"{call.door} is no port")
    return Greeting(call, _facts(message))


def _answer(message: dict[str, Any], ours: Facts) -> tuple[Facts, str]:
    """Return the facts of a host, and why it refuses ours, or "". Raises `ValueError`."""
    reason = message.get("refused")
    if not isinstance(reason, str) or not reason.isprintable():
        raise ValueError(short(reason))
    try:
        return _facts(message), reason
    except ValueError:
        if reason and _other_version(message, ours):
            return ours, reason
        raise


def _facts(message: dict[str, Any]) -> Facts:
    facts = parse_record(Facts, message.get("facts"))
    if problem := problem_of_name(facts.name):
        raise ValueError(problem)
    return facts


def _send(stream: TlsStream, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.sendall(_LENGTH.pack(len(data)) + data)


def _receive(stream: TlsStream) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError`, `EOFError` or `OSError`."""
    (nbytes,) = _LENGTH.unpack(stream.receive(_LENGTH.size))
    if nbytes > MOST_NBYTES:
        raise ValueError(f"a greeting of {nbytes} bytes")
    try:
        message = json.loads(stream.receive(nbytes))
    except RecursionError as error:
        raise ValueError("a greeting that is too deep") from error
    if not isinstance(message, dict):
        raise ValueError("a greeting that is no JSON object")
    return message


def _interrupt(sock: socket.socket) -> None:
    """Wake the thread that waits in a socket; it closes the socket."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
