"""The loss of a host has a name and a limit, and leaves no process; see also `break_hosts.py`."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
from agents import (
    SECRET,
    agent_here,
    call_until_it_fails,
    end,
    free_address,
    free_address6,
    patched_secret,
    start_agent,
    stream_pair,
)  # fmt: skip
from crews import eventually, has_ended
from test_hosts import DEVICE, train
from test_listening import ports_of

from hetpipe.cluster import Cluster
from hetpipe.crew.agent import stay
from hetpipe.crew.crew import Crew
from hetpipe.errors import ClusterError, HetpipeError, WorkerError
from hetpipe.hosts.connection import Address, Connection
from hetpipe.hosts.door import Call, dial
from hetpipe.hosts.facts import own_facts
from hetpipe.hosts.hosts import Hosts
from hetpipe.hosts.meeting import CONTROL, call, parse_address
from hetpipe.hosts.tls import TlsStream
from hetpipe.hosts.wires import Wires
from hetpipe.wire.stream import StreamPort

T = TypeVar("T")
RIGHT = SECRET.encode()
LIMIT_S = 30.0  # far beyond what a quiet machine needs


def test_hosts_that_both_send_much_do_not_wait_for_each_other() -> None:
    """A receiver that waited to answer a sign of life would not empty the other's way."""
    message, rounds = np.zeros(8 << 20, np.uint8), 6
    arrived: list[str] = []
    ends: list[str] = []
    streams = stream_pair()
    connections = [Connection(stream, name) for stream, name in zip(streams, "ab", strict=True)]
    for connection in connections:
        connection.start(
            lambda address, packed, name=connection.peer: arrived.append(name),  # type: ignore[misc]
            ends.append,
        )
    senders = [
        threading.Thread(
            target=lambda end=end: [end.send(Address(1, 0), message) for _ in range(rounds)],  # type: ignore[misc]
            daemon=True,
        )
        for end in connections
    ]
    for sender in senders:
        sender.start()
    assert eventually(lambda: len(arrived) == 2 * rounds or bool(ends), LIMIT_S)
    assert not ends
    for connection in connections:
        connection.close()


def test_a_peer_that_reads_nothing_is_no_silent_host_but_stuck_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process may keep the interpreter's lock; its system answers, even without room."""
    stream, peer = stream_pair()
    ends = SimpleQueue[str]()
    connection = Connection(stream, "b", silence_s=0.5)
    connection.start(lambda address, packed: None, ends.put)

    def send() -> None:
        with suppress(OSError):
            connection.send(Address(1, 0), np.zeros(64 << 20, np.uint8))

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Empty):
        ends.get(timeout=3.0)
    monkeypatch.setattr("hetpipe.hosts.connection.STUCK_S", 1.0)
    assert ends.get(timeout=LIMIT_S).endswith("it is stuck")
    peer.close()


def test_a_receiver_asks_a_silent_host_for_signs_of_life() -> None:
    """The controller does not see a cut between two other hosts."""
    stream, other = stream_pair()
    StreamPort("crew/1", RIGHT, False, None, 0.0).secured(stream.socket, server=True)
    options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    assert stream.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    first_s, each_s, count = (stream.socket.getsockopt(socket.IPPROTO_TCP, o) for o in options)
    assert first_s + each_s * count <= 5
    stream.close()
    other.close()


def test_a_stopped_agent_is_lost_by_name_and_its_workers_end() -> None:
    meet = free_address()
    agent = start_agent("--meet", meet, "--name", "h1")
    with patched_secret():
        cluster = Cluster.hosts(
            meet, 2, name="h0", limit_s=60, devices=[f"h0/{DEVICE}", f"h1/{DEVICE}"]
        )
    with Crew.start(cluster) as crew:
        workers = crew.call(list(crew.infos), "engine_backends:pid")
        os.kill(agent.pid, signal.SIGSTOP)
        with pytest.raises(WorkerError, match=r"host 'h1' .* is lost: .*, or is stopped"):
            call_until_it_fails(crew)
    assert eventually(lambda: all(map(has_ended, workers)), LIMIT_S)
    os.kill(agent.pid, signal.SIGCONT)
    _connections(cluster).close()
    assert end(agent)[0] == 1
    with agent_here(meet):  # the host comes back
        again = Cluster.hosts(meet, 2, name="h0", limit_s=60, devices=[f"h1/{DEVICE}"])
        with Crew.start(again) as crew:
            assert len(crew.call(again.ids, "engine_backends:pid")) == 1
        _connections(again).close()


def _connections(cluster: Cluster) -> Hosts:
    assert cluster.connections is not None
    return cluster.connections


def test_an_agent_is_told_when_another_host_never_comes() -> None:
    meet = free_address()
    with agent_here(meet) as statuses, pytest.raises(ClusterError, match=r"1 of 2 .* \(h1\)"):
        Cluster.hosts(meet, 3, name="h0", limit_s=2.0)
    assert statuses.get(timeout=LIMIT_S) == 1


@pytest.mark.parametrize("name", ["h1", "H1"])
def test_a_second_agent_of_one_name_is_refused_at_both_ends(name: str) -> None:
    meet, told = free_address(), SimpleQueue[str]()

    def join_both() -> None:
        stream, _, door = call(parse_address(meet), RIGHT, own_facts("h1"), Wires(), LIMIT_S)
        door.close()
        try:
            call(parse_address(meet), RIGHT, own_facts(name), Wires(), LIMIT_S)
        except ClusterError as error:
            told.put(str(error))
        with suppress(EOFError):
            while True:
                stream.receive(1)
        stream.close()

    with patched_secret():
        threading.Thread(target=join_both, daemon=True).start()
        reason = f"there is a host 'h1' already: start the agent of '{name}' with another --name"
        with pytest.raises(ClusterError, match=rf"1 of 2 .* \(h1\).* was refused: .*{reason}"):
            Cluster.hosts(meet, 3, name="h0", limit_s=2.0)
    assert reason in told.get(timeout=LIMIT_S)


def test_refused_callers_are_named_once_where_they_lack(caplog: pytest.LogCaptureFixture) -> None:
    meet = free_address()
    older = replace(own_facts("b"), hetpipe="0.0.1")

    def call_in_vain() -> None:
        for _ in range(2):
            for secret, facts in ((RIGHT[::-1], own_facts("c")), (RIGHT, older)):
                with suppress(ClusterError):
                    call(parse_address(meet), secret, facts, Wires(), LIMIT_S)

    with patched_secret():
        threading.Thread(target=call_in_vain, daemon=True).start()
        with pytest.raises(ClusterError) as caught:
            Cluster.hosts(meet, 2, name="h0", limit_s=2.0)
    told = [record.getMessage() for record in caplog.records if "127.0.0.1" in record.message]
    assert told == [
        "a caller from 127.0.0.1 has another secret, or is no host of hetpipe "
        "(TLSV1_ALERT_UNKNOWN_CA)",
        "host 'b' (127.0.0.1) was refused: the caller has hetpipe '0.0.1', and the host that it "
        f"calls {own_facts().hetpipe}: install one version",
    ]
    assert all(text in str(caught.value) for text in told)


def test_a_device_that_a_host_lacks_is_named_with_the_host() -> None:
    meet = free_address()
    with agent_here(meet), pytest.raises(HetpipeError, match=r"host 'h1': .*numpy:cpu:7"):
        Cluster.hosts(meet, 2, name="h0", devices=["h0", "h1/numpy:cpu:7"], limit_s=LIMIT_S)


def test_hosts_meet_by_ipv6() -> None:
    meet = free_address6()
    with agent_here(meet):
        cluster = Cluster.hosts(
            meet, 2, name="h0", limit_s=LIMIT_S, devices=[f"h0/{DEVICE}", f"h1/{DEVICE}"]
        )
        with Crew.start(cluster) as crew:
            assert len(train(crew, cluster.ids, "1f1b")) == 4
        _connections(cluster).close()


def test_a_host_that_is_lost_while_others_gather_frees_its_place(
    caplog: pytest.LogCaptureFixture,
) -> None:
    meet = free_address()

    joined: list[TlsStream] = []

    def join_twice() -> None:
        for _ in range(2):
            stream, _, door = call(parse_address(meet), RIGHT, own_facts("h1"), Wires(), LIMIT_S)
            door.close()
            joined.append(stream)
            if len(joined) == 1:
                stream.close()
                time.sleep(0.3)

    with patched_secret():
        threading.Thread(target=join_twice, daemon=True).start()
        with pytest.raises(ClusterError, match=r"1 of 2 .* \(h1\)"):
            Cluster.hosts(meet, 3, name="h0", limit_s=3.0)
    assert "host 'h1' (127.0.0.1) is lost" in caplog.messages[0]
    for stream in joined:
        stream.close()


def test_an_agent_that_stays_refuses_a_second_training_and_serves_after_a_failed_one() -> None:
    listen, before = free_address6(), ports_of(os.getpid())
    agent = start_agent("--stay", "--listen", listen, "--name", "h1")
    devices = [f"h0/{DEVICE}", f"h1/{DEVICE}"]
    members = devices

    def cluster(limit_s: float = 60.0) -> Cluster:
        return Cluster.hosts(agents=[listen], name="h0", limit_s=limit_s, devices=devices)

    try:
        with patched_secret():
            first = cluster()
            with Crew.start(first) as crew:
                with pytest.raises(
                    ClusterError, match="h1 refuses: this agent works for host 'h0' now"
                ):
                    cluster()
                losses = train(crew, members, "1f1b")
                assert ports_of(agent.pid) == {parse_address(listen)[1]}
                own = ports_of(os.getpid()) - ports_of(agent.pid) - before
                assert own == {_connections(first).door.address[1]}
                worker = crew.call([devices[1]], "engine_backends:pid")[0]
                os.kill(worker, signal.SIGKILL)
                with pytest.raises(WorkerError, match=r"host 'h1'.*SIGKILL"):
                    call_until_it_fails(crew)
            # The controller is gone without a word.
            _connections(first).others["h1"].connection.close()
            _connections(first).close()
            assert eventually(lambda: has_ended(worker))
            second = _once_free(cluster)
            with Crew.start(second) as crew:
                assert train(crew, members, "1f1b") == losses
            _connections(second).close()
    finally:
        agent.send_signal(signal.SIGINT)
        _, words = end(agent)
    assert "Traceback" not in words
    assert not list(Path("/proc").glob(f"{agent.pid}/task"))


def test_agents_that_reach_the_controller_at_different_addresses_train_together() -> None:
    """The controller has the stage in the middle, so both agents connect to it."""
    listen = [free_address(), free_address6()]
    names = ["h1", "h2"]
    agents = [
        start_agent("--stay", "--listen", address, "--name", name)
        for address, name in zip(listen, names, strict=True)
    ]
    devices = [f"{name}/{DEVICE}" for name in ("h1", "h0", "h2")]
    try:
        with patched_secret():
            cluster = Cluster.hosts(
                agents=listen, name="h0", limit_s=60.0, devices=devices, transport="tcp"
            )
            door = _connections(cluster).door
            ports = {door.port_at("127.0.0.1"), door.port_at("::1")}
            assert ports <= ports_of(os.getpid())
            with Crew.start(cluster) as crew:
                assert len(train(crew, devices, "1f1b")) == 4
            _connections(cluster).close()
            assert eventually(lambda: not ports & ports_of(os.getpid()))
    finally:
        for agent in agents:
            agent.send_signal(signal.SIGINT)
            end(agent)


def test_an_agent_that_cannot_begin_ends_the_connection(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refusals: list[BaseException] = [ClusterError("no guard"), SystemExit()]

    def refuse(*_: Any) -> Any:
        raise refusals.pop(0)

    def serve() -> None:
        with suppress(SystemExit):
            stay(address, "h1")

    monkeypatch.setattr("hetpipe.crew.agent.Agent", refuse)
    address = parse_address(free_address())
    with patched_secret():
        agent = threading.Thread(target=serve, daemon=True)
        agent.start()
        for _ in range(2):
            stream = _once_free(lambda: dial(address, RIGHT, own_facts("h0"), Call(CONTROL))[0])
            stream.socket.settimeout(LIMIT_S)
            with pytest.raises(EOFError, match="closed the connection"):
                stream.receive(1)
            stream.close()
        agent.join(LIMIT_S)
    assert not agent.is_alive()
    assert "no longer works for h0: no guard" in capfd.readouterr().out


def _once_free(connect: Callable[[], T]) -> T:
    """Connect once the agent listens and has ended the last training's workers."""
    end_s = time.monotonic() + LIMIT_S
    while True:
        try:
            return connect()
        except (ClusterError, OSError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def test_the_first_message_of_an_encrypted_wire_may_come_after_days(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handshake is part of that message, and a pass before it may take any time."""
    days_s = itertools.count(0.0, 86_400.0)
    clock = SimpleNamespace(monotonic=lambda: next(days_s))
    monkeypatch.setattr("hetpipe.hosts.tls.time", clock)
    with socket.create_server(("127.0.0.1", 0)) as server:
        sending = socket.create_connection(server.getsockname()[:2])
        receiving, _ = server.accept()
    port = StreamPort("crew/1", RIGHT, True, None, 0.0)
    found = SimpleQueue[bytes]()

    def receive() -> None:
        data = bytearray(5)
        port.secured(receiving, server=True).receive_into(memoryview(data))
        found.put(bytes(data))

    threading.Thread(target=receive, daemon=True).start()
    port.secured(sending, server=False).sendall(b"hello")
    assert found.get(timeout=LIMIT_S) == b"hello"
    sending.close()
    receiving.close()
