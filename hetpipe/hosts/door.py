"""The one port on which a host listens, for the control connection and for wires.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from hetpipe.errors import ClusterError
from hetpipe.hosts.facts import Facts
from hetpipe.hosts.tls import HANDSHAKE_S, RefusedError, TlsStream, shut

logger = logging.getLogger("hetpipe")

MOST_GREETINGS = 64
"""Connections that may be in their handshake at the same time; further ones are closed."""
MOST_NBYTES = 64 * 1024
"""Bytes of the longest greeting."""
_LENGTH = struct.Struct("<I")

Greeting = dict[str, Any]
Visitor = Callable[[TlsStream, Greeting], None]
"""Takes over a connection whose greeting was accepted."""


class Door:
    """Listens on an address for hosts with the secret.

    `check(greeting)` returns why a greeting is refused, or "". Then `visitors[purpose]` gets the
    connection, on the thread that greeted it.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        facts: Facts,
        visitors: Mapping[str, Visitor],
        check: Callable[[Greeting], str] = lambda greeting: "",
    ) -> None:
        """Raises `ClusterError` if the address cannot be used."""
        self._secret, self._facts = secret, facts
        self._visitors, self._check = visitors, check
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        try:
            self._server = socket.create_server(address, family=family, backlog=128)
        except OSError as error:
            raise ClusterError(
                f"this host cannot listen on {address[0]} port {address[1]}: {error.strerror}"
            ) from error
        self._room = threading.Semaphore(MOST_GREETINGS)
        self._closing = False
        threading.Thread(target=self._accept, name="hetpipe door", daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        """The address on which this host listens."""
        host, port, *_ = self._server.getsockname()
        return host, port

    def close(self) -> None:
        self._closing = True
        shut(self._server)

    def _accept(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._server.accept()
            except OSError:
                continue  # the door is closing, or the caller was gone at once
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            name = "hetpipe greeting"
            threading.Thread(target=self._greet, args=(sock,), name=name, daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        """Answer a greeting. A caller without the secret learns nothing."""
        try:
            sock.settimeout(HANDSHAKE_S)
            stream = TlsStream(sock, self._secret, server=True)
            greeting = _receive(stream)
            reason = self._reason(greeting)
            _send(stream, {"facts": asdict(self._facts), "refused": reason})
            if not reason:
                sock.settimeout(None)
                self._visitors[greeting["purpose"]](stream, greeting)
                return
        except RefusedError as error:
            logger.info("a connection without the secret was refused: %s", error)
        except (OSError, EOFError, ValueError, KeyError) as error:
            logger.info("a connection was refused: %s", error)
        finally:
            self._room.release()
        shut(sock)

    def _reason(self, greeting: Greeting) -> str:
        theirs, ours = greeting["facts"]["hetpipe"], self._facts.hetpipe
        if theirs != ours:
            return (
                f"it has hetpipe {ours}, and the host that calls has {theirs}: install one version"
            )
        if greeting["purpose"] not in self._visitors:
            return f"it does not answer {greeting['purpose']!r}"
        return self._check(greeting)


def dial(
    address: tuple[str, int], secret: bytes, greeting: Mapping[str, Any]
) -> tuple[TlsStream, Facts]:
    """Connect to a door. Return the stream and the facts of the other host.

    Raises `ClusterError` if the other host refuses, and `OSError` if it does not answer.
    """
    sock = socket.create_connection(address, timeout=HANDSHAKE_S)
    try:
        stream = TlsStream(sock, secret, server=False)
        _send(stream, greeting)
        answer = _receive(stream)
    except RefusedError as error:
        shut(sock)
        raise ClusterError(
            f"{address[0]} port {address[1]} has another secret, or is no host of hetpipe ({error})"
        ) from error
    except EOFError as error:  # the server checks our certificate after its own handshake
        shut(sock)
        raise ClusterError(
            f"{address[0]} port {address[1]} closed the connection: it has another secret, or is "
            f"no host of hetpipe ({error})"
        ) from error
    except OSError:
        shut(sock)
        raise
    if reason := answer["refused"]:
        shut(sock)
        raise ClusterError(f"{answer['facts']['name']} refuses: {reason}")
    sock.settimeout(None)
    return stream, Facts(**answer["facts"])


def greeting(purpose: str, facts: Facts, **more: Any) -> Greeting:
    """Return a host's first message."""
    return {"purpose": purpose, "facts": asdict(facts), **more}


def _send(stream: TlsStream, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    stream.sendall(_LENGTH.pack(len(data)) + data)


def _receive(stream: TlsStream) -> dict[str, Any]:
    """Return a JSON object. Raises `ValueError`, `EOFError` or `OSError`."""
    (nbytes,) = _LENGTH.unpack(stream.receive(_LENGTH.size))
    if nbytes > MOST_NBYTES:
        raise ValueError(f"a greeting of {nbytes} bytes")
    message = json.loads(stream.receive(nbytes))
    if not isinstance(message, dict):
        raise ValueError("a greeting that is no JSON object")
    return message
