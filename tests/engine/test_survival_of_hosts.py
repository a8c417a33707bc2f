"""A training over several hosts goes on without a host that it loses (`survive_hosts.py`)."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from agents import end, free_address, hosts, patched_secret, start_agent
from crews import Crews, eventually
from engine_backends import start_no_worker
from hetpipe.backends.numpy import NumpyBackend
from pipelines import in_one_place
from test_lost_devices import DEVICE, batches, opened, pid_of, trained

from hetpipe.cluster import Cluster
from hetpipe.crew import severed
from hetpipe.crew.agent import serve_once
from hetpipe.crew.crew import Crew
from hetpipe.crew.forkserver import server_for
from hetpipe.crew.severed import Break, culprit
from hetpipe.errors import ClusterError
from hetpipe.hosts.hosts import Hosts
from hetpipe.hosts.meeting import parse_address
from hetpipe.pipeline import absent

Happen = Callable[[Crew], None]
Trained = tuple[list[Any], dict[str, torch.Tensor], tuple[Any, ...]]
FOUR = tuple(f"{host}/{DEVICE}" for host in ("h0", "h1", "h2", "h2"))


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with hosts(*FOUR) as cluster:
        yield cluster


def kill_worker(crew: Crew) -> None:
    os.kill(pid_of(crew, "m1"), signal.SIGKILL)


def kill_agent(crew: Crew) -> None:
    connections = crew.cluster.connections
    assert connections is not None
    os.kill(connections.call_all(10.0, os.getpid)["h1"], signal.SIGKILL)


def sever(crew: Crew) -> None:
    """End the connections between two agents' hosts, while all hosts live."""
    crew.call(["m2"], "breaking:sever")


def broken(cluster: Cluster, happen: Happen, **options: Any) -> Trained:
    """Train over hosts, and break something after a few mini-batches."""
    results = []
    with Crew.start(cluster) as crew, opened(crew, **options) as pipe:
        for result in pipe.run(in_one_place(batches(10))):
            results.append(result)
            if result.index == 4:
                happen(crew)
        return results, pipe.state_dict(), pipe.lost


def check_same(trained: Trained, whole: Trained, error: float) -> None:
    """Check results and weights, each within an error; 0 compares bits."""
    assert [result.index for result in trained[0]] == [*range(10)]
    losses = [[result.loss for result in results] for results, _, _ in (trained, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=error, abs=0.0)
    for name, value in whole[1].items():
        assert torch.allclose(trained[1][name], value, rtol=error, atol=error), name


@pytest.mark.parametrize(
    ("happen", "member", "why"),
    [
        (kill_worker, "m1", "host 'h1': worker 'm1'.*SIGKILL"),
        (sever, "m1", "the connection between worker .* and both still live"),
    ],
)
def test_a_training_over_hosts_goes_on_with_the_devices_that_are_left(
    crews: Crews,
    three: Cluster,
    happen: Happen,
    member: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(severed, "CAUSE_S", 0.5)
    found = broken(three, happen)
    check_same(found, trained(crews((DEVICE,) * 3, "shared-memory")), 1e-6)
    (lost,) = found[2]
    assert lost.members == (member,)
    assert re.search(why, lost.why)


def test_a_broken_wire_blames_no_host_while_another_one_is_silent(
    crews: Crews, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host h2 is found lost only after the wait for a cause, and h1 would be blamed."""
    monkeypatch.setattr(severed, "CAUSE_S", 0.1)

    def fall_silent(crew: Crew) -> None:
        sever(crew)
        connections = crew.cluster.connections
        assert connections is not None
        os.kill(connections.call_all(10.0, os.getpid)["h2"], signal.SIGSTOP)

    with hosts(*FOUR) as cluster:
        found = broken(cluster, fall_silent)
    check_same(found, trained(crews((DEVICE,) * 3, "shared-memory")), 1e-6)
    assert [lost.members for lost in found[2]] == [("m2", "m3")]


def test_after_a_loss_no_run_gets_the_mini_batch_of_another_one(
    crews: Crews, three: Cluster
) -> None:
    """The second run's last mini-batch is the first one that is sent ahead to the new workers."""
    data = batches(6)
    with opened(crews((DEVICE,) * 3, "shared-memory")) as pipe:
        alone = [pipe.step(*data[place]) for place in (0, 2, 3, 4, 1)]
    with Crew.start(three) as crew, opened(crew) as pipe:
        one, other = pipe.run(data[:2]), pipe.run(data[2:])
        found = [next(one).loss, next(other).loss]
        kill_worker(crew)
        found += [next(other).loss, next(other).loss, next(one).loss]
        assert len(pipe.lost) == 1
    assert found == pytest.approx(alone, rel=1e-6)


def test_a_host_that_starts_no_worker_is_lost(crews: Crews) -> None:
    def exhaust(crew: Crew) -> None:
        connections = crew.cluster.connections
        assert connections is not None
        connections.call_each(10.0, start_no_worker, {"h1": ()})
        os.kill(pid_of(crew, "m3"), signal.SIGKILL)

    with hosts(*FOUR) as cluster:
        found = broken(cluster, exhaust)
    check_same(found, trained(crews((DEVICE,) * 3, "shared-memory")), 1e-6)
    assert [lost.members for lost in found[2]] == [("m3", "m1")]


def test_a_lost_host_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def end(crew: Crew) -> None:
        connections = crew.cluster.connections
        assert connections is not None
        os.kill(connections.call_all(10.0, os.getpid)["h2"], signal.SIGKILL)

    with hosts(*FOUR) as cluster, patch.object(absent, "FIRST_S", 0.0):
        broken(cluster, end)
    told = [record.getMessage() for record in caplog.records if "h2" in record.getMessage()]
    assert len(told) <= 2, told  # that it is lost, and how the training continues


def test_a_loss_while_the_next_mini_batch_is_read_loses_no_mini_batch(
    crews: Crews, three: Cluster
) -> None:
    """Its leaves are sent ahead to the hosts; the loss belongs to the mini-batch under way."""
    with Crew.start(three) as crew, opened(crew) as pipe:
        victim = pid_of(crew, "m1")

        def source() -> Iterator[Any]:
            for number, batch in enumerate(batches(10)):
                if number == 5:
                    os.kill(victim, signal.SIGKILL)
                    assert eventually(lambda: bool(crew.lost))
                yield batch

        found = list(pipe.run(source())), pipe.state_dict(), pipe.lost
    check_same(found, trained(crews((DEVICE,) * 3, "shared-memory")), 1e-6)
    assert [lost.members for lost in found[2]] == [("m1",)]


def test_a_spare_takes_the_place_of_a_lost_host(crews: Crews, three: Cluster) -> None:
    options: dict[str, Any] = {"schedule": "pipedream", "spares": ["m3"]}
    found = broken(three, kill_agent, **options)
    check_same(found, trained(crews((DEVICE,) * 4, "shared-memory"), **options), 0.0)
    (lost,) = found[2]
    assert lost.plan.all_devices == ("m0", "m3", "m2")
    assert re.search(r"host 'h1' .* is lost", lost.why)


def test_a_device_of_another_host_that_is_not_found_is_lost(crews: Crews) -> None:
    """It is sought when the workers start again after the loss of another one."""

    def remove(crew: Crew) -> None:
        connections = crew.cluster.connections
        assert connections is not None
        connections.call_each(10.0, setattr, {"h1": (NumpyBackend, "discover", list)})
        os.kill(pid_of(crew, "m2"), signal.SIGKILL)

    with hosts(*FOUR) as cluster:
        found = broken(cluster, remove)
    check_same(found, trained(crews((DEVICE,) * 3, "shared-memory")), 1e-6)
    (lost,) = found[2]
    assert lost.members == ("m2", "m1")
    assert {*lost.plan.all_devices} == {"m0", "m3"}


@pytest.mark.parametrize("stays", [False, True])
def test_a_host_that_returns_joins(stays: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.pipeline.absent.FIRST_S", 0.0)
    monkeypatch.setattr("hetpipe.hosts.meeting.RETURN_S", 0.1)
    address = free_address()
    how = ("--stay", "--listen") if stays else ("--meet",)
    where: Any = {"agents": [address]} if stays else {"meet": address, "count": 2}
    agents = [start_agent(*how, address, "--name", "h1")]
    devices = [f"h0/{DEVICE}", f"h1/{DEVICE}"]
    many = itertools.cycle(batches(10))
    with patched_secret():
        cluster = Cluster.hosts(**where, name="h0", devices=devices, transport="tcp", limit_s=60)
    assert cluster.connections is not None
    try:
        with Crew.start(cluster) as crew, opened(crew, members=devices) as pipe:
            pipe.step(*next(many))
            agents[0].kill()
            assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(pipe.lost), 30.0)
            if not stays:
                with patched_secret(), pytest.raises(ClusterError, match=r"no host .* is 'h2'"):
                    serve_once(parse_address(address), "h2", 5.0)
            agents.append(start_agent(*how, address, "--name", "h1"))
            assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(pipe.joined), 60.0)
            assert pipe.joined[0].members == (devices[1],)
            assert pipe.plan.all_devices == tuple(devices)
            pipe.step(*next(many))
    finally:
        cluster.connections.close()
        for agent in agents:
            agent.send_signal(signal.SIGINT)
            end(agent)


def test_a_host_returns_once_it_reaches_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(severed, "CAUSE_S", 0.5)
    monkeypatch.setattr(absent, "FIRST_S", 0.0)
    is_cut, looks, route = [False], list[str](), Hosts.route
    closed = parse_address(free_address())

    def cut_route(hosts: Hosts, source: str, target: str) -> Any:
        address, ahead_s = route(hosts, source, target)
        return closed if is_cut[0] and (source, target) == ("h1", "h2") else address, ahead_s

    monkeypatch.setattr(Hosts, "route", cut_route)
    monkeypatch.setattr(absent.Absent, "_wait", lambda _, member: looks.append(member))
    many = itertools.cycle(batches(10))
    with hosts(*FOUR) as cluster, Crew.start(cluster) as crew, opened(crew) as pipe:
        pipe.step(*next(many))
        is_cut[0] = True
        sever(crew)
        assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(pipe.lost), 30.0)
        assert pipe.lost[0].members == ("m1",)
        assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(looks), 60.0)
        assert pipe._survival is not None
        back = pipe._survival.absent.back
        assert not back
        is_cut[0] = False
        assert eventually(lambda: pipe.step(*next(many)) > 0 and bool(back), 60.0)
        assert {*back} == {"m1"}


def test_a_variable_that_torch_sets_itself_starts_no_further_fork_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another server would load torch in the middle of a recovery."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    server = server_for({})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert server_for({}) is server


def test_each_host_has_a_fork_server_for_workers_that_share_no_cores() -> None:
    """Workers of h2 share its cores, and one of them may do so no longer after a loss."""
    with hosts(*FOUR) as cluster, Crew.start(cluster) as crew:
        connections = cluster.connections
        assert connections is not None
        code = "len(__import__('hetpipe.crew.forkserver', fromlist=['_servers'])._servers)"
        before = connections.call_all(10.0, eval, code)
        with opened(crew):
            after = connections.call_all(10.0, eval, code)
    assert (before["h2"], after["h2"]) == (1, 2)


@pytest.mark.parametrize(
    ("ends", "places", "workers"),
    [
        ([(1, 0)], "abb", [1, 2]),  # never the controller's host
        ([(1, 3), (3, 1)], "abbc", [3]),  # the host with fewer workers
        ([(1, 2)], "abc", [2]),  # the last one
        ([(1, 2), (1, 3)], "abcd", [1]),  # the host with most broken links
        ([(1, 2), (2, 1), (1, 3)], "abcd", [1]),  # a link counts once
        ([(2, 1)], "abb", [2]),  # inside a host the worker that reports it
        ([(2, 1), (1, 3)], "abbc", [3]),  # a link between hosts explains a break inside one
    ],
)
def test_a_broken_link_between_living_hosts_removes_one_of_them(
    ends: list[tuple[int, int]], places: str, workers: list[int]
) -> None:
    assert culprit([Break(*each, "") for each in ends], places, "a") == workers
