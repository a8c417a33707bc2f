"""TLS 1.3 between hosts that share a secret.

Both ends derive one key and one certificate from the secret, and accept no other certificate. So
each end proves that it knows the secret before a byte of a message is read.
"""

from __future__ import annotations

import datetime
import hashlib
import math
import os
import select
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import lru_cache
from typing import Any

from hetpipe.errors import ClusterError
from hetpipe.memory import anonymous_file

READ_NBYTES = 256 * 1024
HANDSHAKE_S = 10.0


class RefusedError(Exception):
    """The other end does not know the secret, or does not speak TLS."""


@lru_cache(maxsize=8)
def tls_context(secret: bytes, *, server: bool) -> ssl.SSLContext:
    """Return the context for one end of connections between hosts with this secret.

    Raises `ClusterError` if the package `cryptography` is missing.
    """
    certificate, key = _identity(secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # nothing follows the handshake, so the plain stream can follow it
    memory = anonymous_file()
    try:
        os.write(memory, certificate + key)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)
    context.load_verify_locations(cadata=certificate.decode())
    return context


def _identity(secret: bytes) -> tuple[bytes, bytes]:
    """Return the certificate and the private key of a secret, as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise ClusterError(
            "connections between hosts need the package cryptography: pip install 'hetpipe[hosts]'"
        ) from error
    seed = hashlib.blake2b(secret, digest_size=32, person=b"hetpipe-hosts").digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "hetpipe")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2020, 1, 1))  # clocks of hosts may differ
        .not_valid_after(datetime.datetime(2100, 1, 1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    return certificate.public_bytes(serialization.Encoding.PEM), key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


class TlsStream:
    """An encrypted stream over a connected socket. Any thread may send, one thread receives.

    OpenSSL's objects serve one thread at a time. So the object works on memory, under a lock, and
    the socket is read and written without this lock.
    """

    def __init__(
        self, sock: socket.socket, secret: bytes, *, server: bool, limit_s: float = HANDSHAKE_S
    ) -> None:
        """Shake hands. Raises `RefusedError`, or `OSError` if the connection breaks."""
        self.socket = sock
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = tls_context(secret, server=server)
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server)
        # Held while the TLS object encrypts or decrypts; never while the socket waits.
        self._ciphering = threading.Lock()
        # Held while encrypted bytes leave, so that they leave in the order of their encryption.
        self._sending = threading.Lock()
        self._shake_hands(time.monotonic() + limit_s)

    def _shake_hands(self, end_s: float) -> None:
        try:
            while True:
                try:
                    self._tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    self._flush()
                    self._fetch(end_s)
            self._flush()
        except ssl.SSLError as error:
            self._flush()  # the alert tells the other end
            raise RefusedError(error.reason or str(error)) from error

    def _flush(self) -> None:
        if data := self._leaving.read():
            self.socket.sendall(data)

    def _fetch(self, end_s: float) -> None:
        left_s = max(end_s - time.monotonic(), 0.0)
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        limit_ms = None if left_s == math.inf else 1e3 * left_s
        if not left_s or not poll.poll(limit_ms):
            raise TimeoutError("the other end does not answer")
        data = self.socket.recv(READ_NBYTES)
        if not data:
            raise ConnectionResetError("the other end closed the connection")
        self._arrived.write(data)

    def sendall(self, data: Any) -> None:
        """Encrypt and send all bytes. Raises `OSError`."""
        with self._sending:
            with self._ciphering:
                self._tls.write(data)
                encrypted = self._leaving.read()
            self.socket.sendall(encrypted)

    def send_if_free(self, data: Any) -> None:
        """Encrypt and send a few bytes, unless other bytes wait to leave. Raises `OSError`."""
        if not self._sending.acquire(blocking=False):
            return
        try:
            poll = select.poll()
            poll.register(self.socket, select.POLLOUT)
            if not poll.poll(0):
                return
            with self._ciphering:
                self._tls.write(data)
                encrypted = self._leaving.read()
            self.socket.sendall(encrypted)
        finally:
            self._sending.release()

    def receive(self, nbytes: int) -> bytearray:
        """Return exactly `nbytes`. Raises `EOFError` at the stream's end."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises `EOFError` at the stream's end."""
        while view:
            try:
                with self._ciphering:
                    got = int(self._tls.read(len(view), view))  # bytes only without a buffer
            except ssl.SSLWantReadError:
                try:
                    data = self.socket.recv(READ_NBYTES)
                except OSError as error:
                    raise EOFError(str(error)) from error
                if not data:
                    raise EOFError("the other end closed the connection") from None
                with self._ciphering:
                    self._arrived.write(data)
                continue
            except ssl.SSLError as error:
                raise EOFError(error.reason or str(error)) from error
            if not got:
                raise EOFError("the other end closed the connection")
            view = view[got:]

    @property
    def has_arrived(self) -> bool:
        """Whether bytes were read from the socket that `receive` has not returned."""
        return self._tls.pending() > 0 or self._arrived.pending > 0

    def close(self) -> None:
        """Close the socket, also for threads that wait in it."""
        shut(self.socket)


def shut(sock: socket.socket) -> None:
    """Close a socket, and wake threads that wait in it."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
