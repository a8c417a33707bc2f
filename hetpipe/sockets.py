"""Sockets to a host that has just come back, and sockets that block, even if the user's script
sets a default timeout.

`socket.setdefaulttimeout` makes the system's end of each new socket non-blocking, and this state
travels with the descriptor. A process that gets the descriptor would read from an empty socket.
"""

from __future__ import annotations

import errno
import socket


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that block without a limit."""
    left, right = socket.socketpair()
    left.settimeout(None)
    right.settimeout(None)
    return left, right


def socket_of(descriptor: int) -> socket.socket:
    """Return the socket of a descriptor, and let it block without a limit."""
    sock = socket.socket(fileno=descriptor)
    sock.settimeout(None)
    return sock


def connected(address: tuple[str, int], limit_s: float) -> socket.socket:
    """Return a socket that is connected to another host. Raises `OSError`.

    A host that was away and has come back gets a second try: this host's system may have asked the
    network for it before, and then the first try ends when the system gives up.
    """
    try:
        return socket.create_connection(address, timeout=limit_s)
    except OSError as error:
        if error.errno != errno.EHOSTUNREACH:
            raise
        return socket.create_connection(address, timeout=limit_s)
