"""Sends messages between two processes of one host: small messages inline, large ones in shared
memory (stations 3 and 15 of docs/life-of-a-micro-batch.md).

The memory is an anonymous file whose descriptor travels with the message. It has no name, so the
system frees it even if both processes die.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import tempfile
import threading
from collections.abc import Sequence
from typing import Any

INLINE_NBYTES = 32 * 1024
MAX_FDS = 250  # the kernel allows 253 descriptors per message
ALIGN = 64

# Bytes of the body, number of parts (pickle and buffers), whether the body is in a file.
_HEAD = struct.Struct("<QIB")


def anonymous_file(nbytes: int) -> int:
    """Return a descriptor of unnamed shared memory, `nbytes` long."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("hetpipe")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, nbytes)
    return fd


def aligned(offset: int) -> int:
    """Round an offset up to a multiple of a cache line."""
    return -(-offset // ALIGN) * ALIGN


class Channel:
    """One end of a socket pair. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `multiprocessing.connection.wait`."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a picklable message and copies of open descriptors. Raises `OSError`."""
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        parts: list[Any] = [head, *(buffer.raw() for buffer in buffers)]
        sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
        parts.insert(0, sizes)
        nbytes = sum(aligned(len(part)) for part in parts)
        in_file = nbytes > INLINE_NBYTES
        all_fds = list(fds)
        if in_file:
            all_fds.append(anonymous_file(nbytes))
            with mmap.mmap(all_fds[-1], nbytes) as memory:
                _lay_out(parts, memory)
            body: Any = b""
        else:
            body = bytearray(nbytes)
            _lay_out(parts, body)
        frame = _HEAD.pack(nbytes, len(parts) - 1, in_file)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [frame, body], all_fds)
                self._socket.sendall(frame[sent:])
                self._socket.sendall(memoryview(body)[max(sent - len(frame), 0) :])
        finally:
            if in_file:
                os.close(all_fds[-1])

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors. Raises `EOFError` at the stream's end."""
        try:
            frame, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, MAX_FDS)
            frame += self._exactly(_HEAD.size - len(frame)) if frame else b""
            if not frame:
                raise EOFError
            nbytes, count, in_file = _HEAD.unpack(frame)
            body: Any = memoryview(b"") if in_file else memoryview(self._exactly(nbytes))
        except OSError as error:
            raise EOFError from error
        if in_file:
            fd = fds.pop()
            body = memoryview(mmap.mmap(fd, nbytes))
            os.close(fd)
        return _unpack(body, count), list(fds)

    def close(self) -> None:
        """Close this end; `receive` at the other end then raises `EOFError`."""
        self._socket.close()

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return data


def _lay_out(parts: Sequence[Any], memory: Any) -> None:
    offset = 0
    for part in parts:
        memory[offset : offset + len(part)] = part
        offset = aligned(offset + len(part))


def _unpack(body: memoryview, count: int) -> Any:
    sizes = struct.unpack_from(f"<{count}Q", body)
    offset = aligned(8 * count)
    parts = []
    for size in sizes:
        parts.append(body[offset : offset + size])
        offset = aligned(offset + size)
    return pickle.loads(parts[0], buffers=parts[1:])
