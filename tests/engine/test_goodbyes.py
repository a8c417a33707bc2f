"""Ends of connections between hosts: goodbyes, and errors that nobody awaits."""

from __future__ import annotations

import errno
import select
import sys
import threading
import time
from contextlib import suppress
from queue import SimpleQueue

import pytest
from agents import SECRET, stream_pair
from crews import eventually

from hetpipe.crew.agent import SOON_S, Agent
from hetpipe.crew.fleet import Fleet
from hetpipe.crew.plugboard import Outside
from hetpipe.errors import WorkerError
from hetpipe.hosts.connection import Address, Connection
from hetpipe.hosts.door import Door
from hetpipe.hosts.facts import own_facts
from hetpipe.hosts.hosts import HOST, Ask, Goodbye, Hosts, RemoteHost, dismiss
from hetpipe.hosts.wires import Wires
from hetpipe.wire.host_messages import Connect

RIGHT = SECRET.encode()
LIMIT_S = 30.0  # far beyond what a quiet machine needs


class _Full(Fleet):
    """A fleet of a host that has no descriptors left."""

    def send(self, worker: int, message: object) -> None:
        raise AssertionError("nothing is sent")

    def connect(self, worker: int, ends: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def close(self) -> None:
        raise AssertionError("the crew goes on at the agent until the controller ends it")


def test_an_error_at_an_agent_that_nobody_awaits_ends_the_crew() -> None:
    ours, theirs = stream_pair()
    agent = Agent(theirs, own_facts("h0"), Outside(Wires(), RIGHT))
    agent._crews[1] = _Full(), ""
    arrived = SimpleQueue[object]()
    controller = Connection(ours, "h1")
    controller.start(lambda address, message: arrived.put(message.unpack()), arrived.put)
    agent._answer(Ask(0, Connect(1, 0, ())))
    assert "Too many open files" in str(arrived.get(timeout=LIMIT_S))
    controller.close()
    agent._connection.close()


def test_an_agent_may_end_while_the_controller_still_closes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = stream_pair()
    host = RemoteHost(ours, own_facts("h1"), ("10.0.0.1", 1))
    agent = Connection(theirs, "h0")
    agent.start(lambda address, goodbye: agent.close(), lambda reason: None)
    close = host.connection.close

    def late() -> None:
        def receives() -> bool:
            return "hetpipe receive h1" in {each.name for each in threading.enumerate()}

        assert eventually(lambda: not receives(), LIMIT_S)
        close()

    monkeypatch.setattr(host.connection, "close", late)
    dismiss([host], failed=False)
    assert not caplog.messages
    assert not host.lost


def test_a_goodbye_waits_no_longer_than_the_host_may_be_stuck(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A thread that sends keeps the stream, and the host reads nothing."""
    monkeypatch.setattr("hetpipe.hosts.connection.STUCK_S", 1.0)
    ours, theirs = stream_pair()
    host = RemoteHost(ours, own_facts("h1"), ("10.0.0.1", 1))

    def send() -> None:
        with suppress(WorkerError):
            host.send(Address(1, 0), bytes(64 << 20))

    threading.Thread(target=send, daemon=True).start()
    assert eventually(lambda: not select.select([], [ours.socket], [], 0)[1], LIMIT_S)
    dismissing = threading.Thread(
        target=dismiss, args=([host],), kwargs={"failed": True}, daemon=True
    )
    dismissing.start()
    dismissing.join(LIMIT_S)
    assert not dismissing.is_alive()
    assert not caplog.messages
    assert not host.lost
    theirs.close()


@pytest.mark.parametrize("failed", [False, True])
def test_a_goodbye_is_no_loss(failed: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """The connection ends right after it, before the agent's main thread has read it."""
    ours, theirs = stream_pair()
    agent = Agent(theirs, own_facts("the-boss"), Outside(Wires(), RIGHT))
    controller = Connection(ours, "h0")
    controller.start(lambda address, message: None, lambda reason: None)
    controller.send(Address(0, HOST), Goodbye(failed))
    controller.close()
    assert eventually(lambda: agent._arrived.qsize() == 2)  # the goodbye, and the end
    reason = agent.serve()
    time.sleep(2 * SOON_S)  # a thread could tell a loss only now
    words = capfd.readouterr().err
    assert bool(reason) is failed
    assert words.count("'the-boss' is lost: an error ended it") == words.count("the-boss") == failed


@pytest.mark.parametrize("fails", [False, True])
def test_an_error_of_long_ago_does_not_end_a_training(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook goes on after an error, and Python keeps it."""
    monkeypatch.setattr(sys, "last_value", ValueError("of an earlier cell"), raising=False)
    ours, theirs = stream_pair()
    other = RemoteHost(ours, own_facts("h1"), ("10.0.0.1", 1))
    arrived = SimpleQueue[Goodbye]()
    agent = Connection(theirs, "h0")
    agent.start(lambda address, message: arrived.put(message.unpack()), lambda reason: None)
    door = Door(("127.0.0.1", 0), RIGHT, own_facts("h0"), {})
    hosts = Hosts(own_facts("h0"), door, Wires(), RIGHT, [other])
    try:
        if fails:
            raise KeyError("now")
    except KeyError:
        hosts.close()
    else:
        hosts.close()
    assert arrived.get(timeout=LIMIT_S) == Goodbye(fails)
    hosts.close()  # does nothing
    agent.close()
