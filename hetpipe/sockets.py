"""Sockets that block, even if the user's script sets a default timeout.

`socket.setdefaulttimeout` makes the system's end of each new socket non-blocking, and this state
travels with the descriptor. A process that gets the descriptor would read from an empty socket.
"""

from __future__ import annotations

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
