"""Agents as processes of this machine, each a host of its own."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from hetpipe import process
from hetpipe.cluster import Cluster
from hetpipe.crew.agent import serve_once
from hetpipe.crew.crew import Crew
from hetpipe.hosts.meeting import parse_address
from hetpipe.hosts.tls import TlsStream

SECRET = "a secret of the tests alone"


def free_address() -> str:
    """Return an address of the loopback on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def free_address6() -> str:
    """Return such an address of IPv6. Skips the test on a system without IPv6."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
            return f"[::1]:{server.getsockname()[1]}"
    except OSError as error:
        pytest.skip(f"this system has no IPv6: {error}")


def start_agent(
    *arguments: str, before: Sequence[str] = (), **variables: str
) -> subprocess.Popen[str]:
    """Start `hetpipe agent`; words `before` it begin the command."""
    return subprocess.Popen(
        [*before, *process.command("hetpipe", "agent", *arguments)],
        env=process.environment({"HETPIPE_SECRET": SECRET, **variables}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def hosts(*devices: str, transport: str = "tcp") -> Iterator[Cluster]:
    """Yield a cluster of this process, host h0, and an agent for each other host.

    Tensors between them take streams, as between machines, unless `transport` is "auto".

    The members are m0, m1, ..., on the devices `host/device` in this order.
    """
    names = sorted({device.partition("/")[0] for device in devices} - {"h0"})
    address = free_address()
    agents = [start_agent("--meet", address, "--name", name) for name in names]
    with patched_secret():
        cluster = Cluster.hosts(
            address, len(names) + 1, devices=devices, name="h0", transport=transport, limit_s=60
        )
    assert cluster.connections is not None
    found = {member.id: member for member in cluster.members}
    try:
        members = []
        for n, device in enumerate(devices):
            number = devices[:n].count(device)
            member = found.get(device) or found[f"{device}#{number}"]
            members.append(replace(member, id=f"m{n}"))
        yield replace(cluster, members=tuple(members))
    finally:
        cluster.connections.close()
        for agent in agents:
            end(agent)


@contextmanager
def agent_here(meet: str, name: str = "h1") -> Iterator[SimpleQueue[int]]:
    """Serve a training as a host of its own, on a thread of this process; yield its status."""
    statuses = SimpleQueue[int]()
    with patched_secret():
        thread = threading.Thread(
            target=lambda: statuses.put(serve_once(parse_address(meet), name, 30.0)), daemon=True
        )
        thread.start()
        yield statuses
    thread.join(30.0)


@contextmanager
def patched_secret(secret: str = SECRET) -> Iterator[None]:
    """Give this process a secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETPIPE_SECRET", secret)
        yield


def end(agent: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for an agent's end, and kill it if it does not end. Return its status and its words."""
    try:
        _, words = agent.communicate(timeout=10)
    except subprocess.TimeoutExpired:
        agent.kill()
        _, words = agent.communicate()
    return agent.returncode, words


def call_until_it_fails(crew: Crew) -> None:
    """Call all workers again and again; return only by an error."""
    while True:
        crew.call(list(crew.infos), "engine_backends:pid")
        time.sleep(0.05)


def stream_pair() -> tuple[TlsStream, TlsStream]:
    """Return both ends of an encrypted stream."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        dialed = socket.create_connection(server.getsockname()[:2])
        accepted, _ = server.accept()
    ends: list[TlsStream] = []
    thread = threading.Thread(
        target=lambda: ends.append(TlsStream(accepted, SECRET.encode(), server=True)), daemon=True
    )
    thread.start()
    ours = TlsStream(dialed, SECRET.encode(), server=False)
    thread.join()
    return ours, ends[0]
