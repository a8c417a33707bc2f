"""A default timeout for sockets, which the user's script sets, changes no training."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from agents import hosts
from test_hosts import DEVICE, train
from test_lost_devices import batches, opened, pid_of

from hetpipe.capture.program import INPUT, Slot
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import Member
from hetpipe.cluster.topology import Link
from hetpipe.crew import forkserver
from hetpipe.crew.crew import Crew
from hetpipe.sdk.host.registry import open_device
from hetpipe.wire import sharedmemory
from hetpipe.wire.shares import Replica
from hetpipe.wire.wire import Content, Kind, Wire

TIMEOUT_S = 1e-3
FORWARD = Kind(Content.FORWARD, 4)
WIRE = Wire(Replica(0, 0), Replica(1, 0), {FORWARD: (Slot("x", INPUT, (8,), "float32"),)})


@contextmanager
def default_timeout() -> Iterator[None]:
    """Set a default timeout, as a user's script or a library of it does."""
    socket.setdefaulttimeout(TIMEOUT_S)
    try:
        yield
    finally:
        socket.setdefaulttimeout(None)


def members(count: int, transport: str) -> Cluster:
    return Cluster(tuple(Member(f"m{n}", DEVICE) for n in range(count)), transport=transport)


@pytest.mark.parametrize("opened_with_timeout", [False, True])
def test_a_receiver_waits_for_a_slot(opened_with_timeout: bool) -> None:
    """A worker has no default timeout, but its descriptors come from a process that has one."""
    device = open_device(DEVICE)
    with default_timeout():
        (port, sending), (_, receiving) = sharedmemory.plugs(WIRE, (0, 1), 0, 1, False)
        if opened_with_timeout:
            outlet = port.outlet(WIRE, device, Link(), sending)
            inlet = port.inlet(WIRE, device, receiving)
    if not opened_with_timeout:
        outlet = port.outlet(WIRE, device, Link(), sending)
        inlet = port.inlet(WIRE, device, receiving)
    sent = np.arange(8, dtype=np.float32)
    sender = threading.Timer(0.2, outlet.send, (FORWARD, [sent]))
    sender.start()
    (found,), _ = inlet.receive(FORWARD)
    np.testing.assert_array_equal(found.array, sent)
    sender.join()
    outlet.close()
    inlet.close()


@pytest.mark.parametrize("transport", ["shared-memory", "local", "distributed"])
def test_a_training_has_the_losses_of_one_without_a_timeout(transport: str) -> None:
    with Crew.start(members(2, transport)) as crew:
        expected = train(crew, "01", "1f1b")
    forkserver.close_servers()  # so that the server starts with the timeout as well
    with default_timeout(), Crew.start(members(2, transport)) as crew:
        assert train(crew, "01", "1f1b") == expected
    with Crew.start(members(2, transport)) as crew, default_timeout():
        assert train(crew, "01", "1f1b") == expected


@pytest.mark.parametrize("transport", ["auto", "tls"])
def test_a_training_over_hosts_has_the_losses_of_one_without_a_timeout(transport: str) -> None:
    with Crew.start(members(2, "shared-memory")) as crew:
        expected = train(crew, "01", "1f1b")
    with ExitStack() as stack:
        stack.enter_context(default_timeout())
        cluster = stack.enter_context(hosts(f"h0/{DEVICE}", f"h1/{DEVICE}", transport=transport))
        crew = stack.enter_context(Crew.start(cluster))
        assert train(crew, "01", "1f1b") == expected


def test_a_training_goes_on_after_a_loss_behind_a_new_timeout() -> None:
    with Crew.start(members(3, "shared-memory")) as crew, opened(crew) as pipe:
        expected = [result.loss for result in pipe.run(batches(8))]
    losses = []
    with Crew.start(members(3, "shared-memory")) as crew, opened(crew) as pipe:
        victim = pid_of(crew, "m1")
        with default_timeout():
            for result in pipe.run(batches(8)):
                losses.append(result.loss)
                if result.index == 3:
                    os.kill(victim, signal.SIGKILL)
            assert [lost.members for lost in pipe.lost] == [("m1",)]
    assert losses == pytest.approx(expected, rel=1e-6)
