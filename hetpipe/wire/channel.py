"""Sends messages between two processes of one host: small messages inline, large ones in shared
memory (stations 3 and 15 of docs/life-of-a-micro-batch.md).

The memory is an anonymous file whose descriptor travels with the message. It has no name, so the
system frees it even if both processes die. A channel keeps a few files, since the first write to a
page of new memory costs more than the copy: the receiver copies a message out of such a file, and
marks the file free for another message.
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from hetpipe.errors import HetpipeError
from hetpipe.memory import anonymous_file
from hetpipe.packing import Packed, pack

INLINE_NBYTES = 32 * 1024
MAX_FDS = 250  # the kernel allows 253 descriptors per message
ALIGN = 64
KEPT_NBYTES = 64 * 1024**2
"""The largest message in a file that the channel keeps; a larger one gets a file for itself."""
KEPT_FILES = 4
WAIT_S = 0.001
"""Seconds between two looks whether the other end has read a message."""

# Bytes of the body, number of parts (pickle and buffers), where the body is.
_HEAD = struct.Struct("<QIB")
INLINE, OWN_FILE, KEPT_FILE = range(3)
FREE, TAKEN = 0, 1  # the first byte of a kept file; the body begins at `ALIGN`


def aligned(offset: int) -> int:
    """Round an offset up to a multiple of a cache line."""
    return -(-offset // ALIGN) * ALIGN


class Channel:
    """One end of a socket pair. Any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)  # the user's script may have set a default timeout
        self._socket = sock
        self._sending = threading.Lock()
        self._files = _KeptFiles()

    def fileno(self) -> int:
        """Return the socket's descriptor, for `multiprocessing.connection.wait`."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a picklable or packed message, and copies of open descriptors. Raises `OSError`."""
        parts = list(pack(message).parts)
        sizes = struct.pack(f"<{len(parts)}Q", *(len(part) for part in parts))
        parts.insert(0, sizes)
        nbytes = sum(aligned(len(part)) for part in parts)
        place, all_fds, body = INLINE, list(fds), bytearray(0)
        if nbytes <= INLINE_NBYTES:
            body = bytearray(nbytes)
            _lay_out(parts, body)
        elif (kept := self._files.take(ALIGN + nbytes)) is not None:
            place = KEPT_FILE
            all_fds.append(os.dup(kept.fd))
            _lay_out(parts, memoryview(kept.memory)[ALIGN:])
        else:
            place = OWN_FILE
            all_fds.append(anonymous_file(nbytes))
            with mmap.mmap(all_fds[-1], nbytes) as memory:
                _lay_out(parts, memory)
        frame = _HEAD.pack(nbytes, len(parts) - 1, place)
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [frame, body], all_fds)
                self._socket.sendall(frame[sent:])
                self._socket.sendall(memoryview(body)[max(sent - len(frame), 0) :])
        finally:
            if place != INLINE:
                os.close(all_fds[-1])

    def send_beside(self, message: Any) -> None:
        """Send a message once the other end has read most of the earlier large ones, so that other
        messages never wait for many of them. Raises `OSError`."""
        while not self._files.has_free:
            time.sleep(WAIT_S)
        self.send(message)

    def receive(self) -> tuple[Any, list[int]]:
        """Return the next message and its descriptors. Raises `EOFError` at the stream's end, and
        `HetpipeError` if this process may open no further files."""
        message, fds = self.receive_packed()
        return message.unpack(), fds

    def receive_packed(self) -> tuple[Packed, list[int]]:
        """Return the next message as it travels, and its descriptors. Raises as `receive`."""
        try:
            frame, fds, flags, _ = socket.recv_fds(self._socket, _HEAD.size, MAX_FDS)
            if flags & socket.MSG_CTRUNC:
                _refuse(fds)
            frame += self._exactly(_HEAD.size - len(frame)) if frame else b""
            if not frame:
                raise EOFError
            nbytes, count, place = _HEAD.unpack(frame)
            body: Any = memoryview(self._exactly(nbytes) if place == INLINE else b"")
        except OSError as error:
            raise EOFError from error
        if place != INLINE:
            body = (_copied if place == KEPT_FILE else _mapped)(fds[-1], nbytes)
            os.close(fds.pop())
        return _parts(body, count), list(fds)

    def close(self) -> None:
        """Close this end; `receive` at the other end then raises `EOFError`."""
        self._socket.close()
        self._files = _KeptFiles()

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if got == 0:
                raise EOFError
            view = view[got:]
        return data


class _KeptFile:
    """Shared memory for one message after another."""

    def __init__(self, nbytes: int) -> None:
        self.fd = anonymous_file(nbytes)
        weakref.finalize(self, os.close, self.fd)
        self.memory = mmap.mmap(self.fd, nbytes)


class _KeptFiles:
    """The files of a channel's sending end."""

    def __init__(self) -> None:
        self._files: list[_KeptFile] = []
        self._taking = threading.Lock()

    def take(self, nbytes: int) -> _KeptFile | None:
        """Take a free file of at least this size; None if the other end still has to read all."""
        if nbytes > KEPT_NBYTES:
            return None
        with self._taking:
            free = [file for file in self._files if file.memory[0] == FREE]
            found = next((file for file in free if len(file.memory) >= nbytes), None)
            if found is None:
                if len(self._files) == KEPT_FILES:
                    if not free:
                        return None
                    self._files.remove(free[0])
                self._files.append(found := _KeptFile(nbytes))
            found.memory[0] = TAKEN
            return found

    @property
    def has_free(self) -> bool:
        """Whether a message finds a free file."""
        with self._taking:
            few = len(self._files) < KEPT_FILES
            return few or any(file.memory[0] == FREE for file in self._files)


def _refuse(fds: Sequence[int]) -> NoReturn:
    """Raise the error for a message that has lost some of its descriptors."""
    for fd in fds:
        os.close(fd)
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise HetpipeError(
        f"process {os.getpid()} may open no further files, and a message needs one (its limit is "
        f"{limit}): close files in the script, or raise the limit (ulimit -n)"
    )


def _copied(fd: int, nbytes: int) -> memoryview:
    """Return a copy of the message in a kept file, and mark the file free."""
    body = np.empty(nbytes, np.uint8).data
    begin = 0
    while begin < nbytes:  # the system may read less than asked for
        begin += os.preadv(fd, [body[begin:]], ALIGN + begin)
    os.pwrite(fd, bytes([FREE]), 0)
    return body


def _mapped(fd: int, nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(fd, nbytes))


def _lay_out(parts: Sequence[Any], memory: Any) -> None:
    offset = 0
    for part in parts:
        memory[offset : offset + len(part)] = part
        offset = aligned(offset + len(part))


def _parts(body: memoryview, count: int) -> Packed:
    sizes = struct.unpack_from(f"<{count}Q", body)
    offset = aligned(8 * count)
    parts = []
    for size in sizes:
        parts.append(body[offset : offset + size])
        offset = aligned(offset + size)
    return Packed(parts)
