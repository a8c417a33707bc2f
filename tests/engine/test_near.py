"""Wires between hosts of one machine: their messages take shared memory, not the network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from agents import hosts
from crews import eventually, has_ended

from hetpipe.capture.program import INPUT, Slot
from hetpipe.cluster.topology import Link
from hetpipe.cluster.transports import transport_of
from hetpipe.crew.plugboard import Outside, Plugboard
from hetpipe.errors import WorkerError
from hetpipe.hosts.door import Door
from hetpipe.hosts.facts import memory_id, own_facts
from hetpipe.hosts.meeting import WIRE
from hetpipe.hosts.wires import Wires
from hetpipe.sdk.host.registry import open_device
from hetpipe.wire import near
from hetpipe.wire.ends import Plug, Route, WireEnd
from hetpipe.wire.near import NearPort
from hetpipe.wire.shares import Replica
from hetpipe.wire.stream import StreamPort
from hetpipe.wire.transport import EdgeClosedError, Inlet, Outlet
from hetpipe.wire.wire import Content, Kind, Wire

SECRET = b"a secret of the tests alone"
FORWARD = Kind(Content.FORWARD, 4)
COUNT = 300_000
LAYOUT = (Slot("x", INPUT, (COUNT,), "float32"),)
THE_WIRE = Wire(Replica(0, 0), Replica(1, 0), {FORWARD: LAYOUT})
DEVICE = open_device("numpy:cpu:0")


@contextmanager
def ends() -> Iterator[tuple[Outlet, Inlet]]:
    """Yield both ends of a wire between two hosts of this machine."""
    wires = Wires()
    wires.open("crew")
    door = Door(("127.0.0.1", 0), SECRET, own_facts("b"), {WIRE: wires.visitor})
    address = (door.address[0], door.address[1])
    sending = NearPort(StreamPort("crew/1", SECRET, False, address, 0.0))
    receiving = NearPort(StreamPort("crew/1", SECRET, False, None, 0.0))
    inlet = receiving.inlet(THE_WIRE, DEVICE, [wires.expect("crew/1")])
    outlet = sending.outlet(THE_WIRE, DEVICE, Link(), [])
    try:
        yield outlet, inlet
    finally:
        outlet.close()
        inlet.close()
        door.close()


def refuse(path: str, flags: int) -> int:
    raise PermissionError(13, "Permission denied", path)


def test_messages_pass_before_and_after_the_receiver_opens_the_memory() -> None:
    with ends() as (outlet, inlet):
        assert outlet.immediate()
        for number in range(3):  # the slots of the ring
            outlet.send(FORWARD, [np.full(COUNT, number, np.float32)])
        assert not outlet.immediate()
        for number in range(9):
            (array,), _ = inlet.receive(FORWARD)
            assert (array.array == number).all()
            outlet.send(FORWARD, [np.full(COUNT, number + 3, np.float32)])


def test_the_receiver_notices_that_the_sender_is_gone() -> None:
    with ends() as (outlet, inlet):
        outlet.send(FORWARD, [np.zeros(COUNT, np.float32)])
        inlet.receive(FORWARD)
        outlet.close()
        with pytest.raises(EdgeClosedError):
            inlet.receive(FORWARD)
    with ends() as (outlet, inlet):
        inlet.close()
        with pytest.raises(EdgeClosedError):
            inlet.receive(FORWARD)


@pytest.mark.parametrize("is_zombie", [False, True])
def test_the_receiver_notices_that_the_sender_has_ended_before_the_first_message(
    is_zombie: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import time\n"
        "from test_near import *\n"
        "address = ('127.0.0.1', int(sys.argv[1]))\n"
        "port = NearPort(StreamPort('crew/1', SECRET, False, address, 0.0))\n"
        "outlet = port.outlet(THE_WIRE, DEVICE, Link(), [])\n"
        "print(flush=True)\n"
        "time.sleep(60)"
    )
    wires = Wires()
    wires.open("crew")
    door = Door(("127.0.0.1", 0), SECRET, own_facts("b"), {WIRE: wires.visitor})
    port = NearPort(StreamPort("crew/1", SECRET, False, None, 0.0))
    inlet = port.inlet(THE_WIRE, DEVICE, [wires.expect("crew/1")])
    with subprocess.Popen(
        [sys.executable, "-c", code, str(door.address[1])],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
    ) as sender:
        assert sender.stdout is not None
        assert sender.stdout.readline()
        sender.kill()
        if not is_zombie:
            sender.wait()
        assert eventually(lambda: has_ended(sender.pid))
        if is_zombie and os.geteuid() == 0:
            monkeypatch.setattr(near.os, "open", refuse)
        with pytest.raises(EdgeClosedError, match="the sender, has ended"):
            inlet.receive(FORWARD)
    inlet.close()
    door.close()


def test_memory_that_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with ends() as (_, inlet):
        monkeypatch.setattr(near.os, "open", refuse)
        text = f'memory of process {os.getpid()}, .* Permission denied.* use transport="tcp"'
        with pytest.raises(WorkerError, match=text):
            inlet.receive(FORWARD)


def test_the_transport_and_the_hosts_decide() -> None:
    outside = Outside(Wires(), SECRET)
    for transport, is_near, expected in [
        ("auto", True, NearPort),
        ("auto", False, StreamPort),
        ("tcp", True, StreamPort),
        ("tls", True, StreamPort),
    ]:
        route = Route("crew/1", ("127.0.0.1", 1), 0.0, is_near)
        plug = Plug(1, sends=True, ranks=(0, 1), pieces=1, direct=False, route=route)
        board = Plugboard(transport_of(transport), outside)
        with board.connect([WireEnd(THE_WIRE, plug)]) as (edges, _):
            assert type(edges.ends[0].port) is expected


def test_hosts_of_one_machine_are_near() -> None:
    with hosts("h1/numpy:cpu:0", transport="auto") as cluster:
        assert cluster.connections is not None
        assert cluster.connections.near("h0", "h1")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, unshare")
@pytest.mark.parametrize("space", ["--net", "--time", "--pid"])
def test_processes_of_another_namespace_have_another_memory(space: str) -> None:
    code = "from hetpipe.hosts.facts import memory_id; print(memory_id())"
    apart = ["unshare", space, *(["--fork"] if space != "--net" else [])]
    found = subprocess.run([*apart, sys.executable, "-c", code], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(found.stderr)
    assert "" != found.stdout.strip() != memory_id()
