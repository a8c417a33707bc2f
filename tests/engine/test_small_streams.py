"""Small messages between hosts leave without a thread, as long as the system has room for them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from crews import eventually

from hetpipe.capture.program import INPUT, Slot
from hetpipe.cluster.topology import Link
from hetpipe.sdk.host.registry import open_device
from hetpipe.wire.edges import DirectReceiver, PrefetchingReceiver, make_receiver
from hetpipe.wire.shares import Replica
from hetpipe.wire.stream import SMALL_NBYTES, StreamPort, _StreamInlet, _StreamOutlet
from hetpipe.wire.wire import Content, Kind, Wire

FORWARD = Kind(Content.FORWARD, 4)
DEVICE = open_device("numpy:cpu:0")


@contextmanager
def ends(count: int) -> Iterator[tuple[_StreamOutlet, _StreamInlet]]:
    """Yield both ends of a wire for messages of `count` floats."""
    layout = (Slot("x", INPUT, (count,), "float32"),)
    wire = Wire(Replica(0, 0), Replica(1, 0), {FORWARD: layout})
    port = StreamPort("wire", b"secret", False, None, 0.0)
    ours, theirs = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server, ours:
        dialled = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            socket.send_fds(ours, [b"\1"], [accepted.fileno()])
    outlet = _StreamOutlet(port, dialled, wire, DEVICE, Link())
    inlet = _StreamInlet(port, os.dup(theirs.fileno()), wire, DEVICE)
    theirs.close()
    yield outlet, inlet
    outlet.close()
    inlet.close()


def test_small_messages_leave_at_once_until_the_system_is_full() -> None:
    count = SMALL_NBYTES // 8
    with ends(count) as (outlet, inlet):
        assert not outlet.immediate()  # the receiver may not be there
        outlet.send(FORWARD, [np.zeros(count, np.float32)])
        sent = 1
        while outlet.immediate():
            outlet.send(FORWARD, [np.full(count, sent, np.float32)])
            sent += 1
        assert sent > 2
        for number in range(sent):
            (array,), _ = inlet.receive(FORWARD)
            assert array.array[0] == number
        assert eventually(outlet.immediate)


def test_only_the_receiver_of_large_messages_has_a_thread() -> None:
    for count, kind in [(SMALL_NBYTES // 8, DirectReceiver), (SMALL_NBYTES, PrefetchingReceiver)]:
        with ends(count) as (outlet, inlet):
            outlet.send(FORWARD, [np.zeros(count, np.float32)])
            assert outlet.immediate() is (kind is DirectReceiver)
            receiver = make_receiver(inlet, lambda error: None)
            assert isinstance(receiver, kind)
            receiver.close()
