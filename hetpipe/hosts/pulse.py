"""Tells whether another host's system answers, even while its process does not.

TCP_USER_TIMEOUT would not do: it also ends a connection whose other process reads nothing for a
while, although the other system answers.
"""

from __future__ import annotations

import socket
import struct

_INFO = struct.Struct("=3xB20xI24xII")
"""The begin of Linux's `struct tcp_info`: unanswered probes of a full receiver, packets without an
answer, and milliseconds since data and since an answer came."""


def has_answered(sock: socket.socket, within_s: float) -> bool:
    """Return whether the other system has answered in the last `within_s`, or owes no answer."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # the connection has ended, and its receiver says why
        return True
    probes, packets, data_ms, answer_ms = _INFO.unpack(info)
    # A system may leave a single probe without an answer.
    return not (packets or probes > 1) or min(data_ms, answer_ms) <= 1e3 * within_s


def lost_way(sock: socket.socket) -> str:
    """Return why this host has no way to the other one; "" if it has one."""
    try:
        with socket.socket(sock.family, socket.SOCK_DGRAM) as trial:
            trial.connect(sock.getpeername())  # sends nothing
    except OSError as error:
        return str(error)
    return ""
