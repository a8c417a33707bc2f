"""Trainings over hosts with a network between them, by torchrun as a user starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import hosted
import pytest
from networks import Line, Network, network

from hetpipe.cluster.member import available_cores

MEETING = "29500"
QUICK = {
    "turns": {
        "model": "mlp", "members": "0101", "schedule": "interleaved", "clip_norm": 0.1,
    },
    "replicas": {"model": "mlp", "members": ["01"], "shares": [(2.0, 1.0)]},
}  # fmt: skip
LINES = {
    "1 Gb/s, 5 ms": Line(125e6, 5e-3),
    "10 Gb/s, 0.2 ms": Line(1.25e9, 2e-4),
    "1 Gb/s, 1 ms, 1 % lost": Line(125e6, 1e-3, 0.01),
}


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let scripts of other hosts find this test's modules."""
    folders = Path(hosted.__file__).parent, Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


def start(net: Network, folder: Path, cases: Mapping[str, Any], transport: str = "auto") -> Any:
    """Start a training by torchrun on all hosts. Its result will be in the folder."""
    task = folder / "task.json"
    devices = [f"{host}/{hosted.DEVICE}" for host in net.hosts]
    task.write_text(json.dumps({"devices": devices, "cases": cases, "transport": transport}))
    return net.start_torchrun(hosted.__file__, task, folder / "result.json")


def finish(net: Network, folder: Path, started: Any, limit_s: float = 240.0) -> dict[str, Any]:
    """Return the result of a training that was started."""
    ends = net.wait(started, limit_s)
    words = "".join(f"\n--- {host}: {end.status}\n{end.words}" for host, end in ends.items())
    assert all(end.status == 0 for end in ends.values()), words
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def numbers(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the losses of each case, without its times."""
    return {name: (case["losses"], case["evaluated"]) for name, case in results.items()}


def listening(net: Network, host: str) -> set[str]:
    """Return the addresses on which a host listens now; the port only of the rendezvous."""
    lines = net.run(host, "ss", "-Hltn").splitlines()
    found = {line.split()[3].rpartition(":") for line in lines}
    return {f"{address}:{port if port == MEETING else 'free'}" for address, _, port in found}


def test_two_hosts_train_as_one_and_listen_only_where_they_must(
    tmp_path: Path, variables: None
) -> None:
    heard: dict[str, set[str]] = {}
    with network(2, tmp_path) as net:
        started = start(net, tmp_path, QUICK)
        while started["h0"].poll() is None:
            for host in net.hosts:
                heard[host] = heard.get(host, set()) | listening(net, host)
            time.sleep(0.5)
        results = finish(net, tmp_path, started)
    assert numbers(results) == numbers(hosted.on_one_host(2, QUICK, available_cores()))
    torchrun = {f"*:{MEETING}", "*:free"}  # its rendezvous and its store
    assert heard["h0"] == torchrun | {f"{net.address('h0')}:free"}
    assert heard["h1"] == {f"{net.address('h1')}:free"}


PEER = """
import socket, sys, time
from queue import SimpleQueue
from hetpipe.hosts.connection import Connection
from hetpipe.hosts.tls import TlsStream

host, address = sys.argv[1], (sys.argv[2], 7000)
if host == "h0":
    with socket.create_server(address) as server:
        sock, _ = server.accept()
else:
    while True:
        try:
            sock = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
stream = TlsStream(sock, b"a secret of the tests", server=host == "h0")
ended = SimpleQueue()
Connection(stream, "the other", silence_s=1.0).start(lambda *_: None, ended.put)
print("connected", flush=True)
print(ended.get(timeout=30))
"""


def test_a_cut_is_found_by_the_silence_of_the_other_system(tmp_path: Path) -> None:
    with network(2, tmp_path) as net:
        command = sys.executable, "-c", PEER
        peers = {host: net.start(host, *command, host, net.address("h0")) for host in net.hosts}
        for peer in peers.values():
            assert peer.stdout is not None
            assert peer.stdout.readline() == "connected\n"
        subprocess.run(["ip", "-n", net.namespace("h1"), "link", "set", "eth0", "down"], check=True)
        ends = net.wait(peers, 30.0)
    assert ends["h0"].words == "it has given no sign of life for 1 s\n"
    reasons = "it has given no sign of life for 1 s", "[Errno 101] Network is unreachable"
    assert ends["h1"].words.strip() in reasons  # the host whose cable is cut knows more


LISTENER = """
import socket, sys, time

with socket.create_server((sys.argv[1], 7000)):
    print("listens", flush=True)
    time.sleep(60)
"""
CALLER = """
import socket, sys, time
from hetpipe.hosts.door import reach

address = sys.argv[1], 7000
with socket.socket() as early:
    early.setblocking(False)
    early.connect_ex(address)
    print("asks", flush=True)
    time.sleep(2.5)
    reach(None, [address])
    print("connected", flush=True)
"""


def test_a_host_that_comes_back_is_reached_at_once(tmp_path: Path) -> None:
    """The system has asked for the host before, and gives up only now."""
    with network(2, tmp_path) as net:
        command = sys.executable, "-c"
        listener = net.start("h1", *command, LISTENER, net.address("h1"))
        assert listener.stdout is not None
        assert listener.stdout.readline() == "listens\n"
        cable = ["ip", "-n", net.switch, "link", "set", "h1"]
        subprocess.run([*cable, "down"], check=True)
        caller = net.start("h0", *command, CALLER, net.address("h1"))
        assert caller.stdout is not None
        assert caller.stdout.readline() == "asks\n"
        time.sleep(2.3)
        subprocess.run([*cable, "up"], check=True)
        words = net.wait({"h0": caller}, 30.0)["h0"].words
        net.kill("h1")
        listener.communicate()
    assert words == "connected\n"


@pytest.mark.slow
def test_devices_and_doctor_show_all_hosts(tmp_path: Path) -> None:
    """The hosts meet by their IPv6 addresses."""
    file = tmp_path / "found.json"
    with network(2, tmp_path) as net:
        net.name_addresses({host: net.address6(host) for host in net.hosts})
        for command in (("devices",), ("doctor", "--backends", "numpy")):
            started = net.start_torchrun("-m", "hetpipe", *command, "--json", file)
            ends = net.wait(started, 200.0)
            words = "".join(f"\n--- {host}\n{end.words}" for host, end in ends.items())
            print(words)
            assert all(end.status == 0 for end in ends.values()), words
            found = json.loads(file.read_text())
            for host in net.hosts:
                assert f"host {host}: " in ends["h0"].words
            if command == ("devices",):
                assert [each["name"] for each in found["hosts"]] == ["h0", "h1"]
                assert "h0/numpy:cpu:0" in ends["h0"].words  # h1 has the same
            else:
                tested = [(each["host"], each["selftest"]["ok"]) for each in found["devices"]]
                assert tested == [("h0", True), ("h1", True)]


@pytest.mark.slow
def test_a_command_trains_on_the_hosts_of_a_cluster_file(tmp_path: Path) -> None:
    file, found = tmp_path / "lab.toml", tmp_path / "found.json"
    with network(2, tmp_path) as net:
        file.write_text(
            "".join(
                f'[[host]]\nname = "{host}"\n[[device]]\nhost = "{host}"\nid = "own"\n'
                'device = "numpy:cpu:0"\n'
                for host in net.hosts
            )
        )
        words = "--cluster", file, "--steps", 2, "--cuts", 1, "--json", found
        ends = net.wait(net.start_torchrun("-m", "hetpipe", "train", "mlp", *words), 200.0)
        texts = "".join(f"\n--- {host}\n{end.words}" for host, end in ends.items())
        assert all(end.status == 0 for end in ends.values()), texts
        devices = [stage["devices"] for stage in json.loads(found.read_text())["plan"]["stages"]]
        assert sorted(devices) == [["h0/own"], ["h1/own"]]


@pytest.mark.slow
def test_conform_examines_a_device_on_each_host(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    words = ("conform", "numpy", "--device", "numpy:cpu:0", "--level", "core", "--group", "events")
    with network(2, tmp_path) as net:
        started = net.start_torchrun("-m", "hetpipe", *words, "--json", file)
        ends = net.wait(started, 200.0)
    assert [end.status for end in ends.values()] == [0, 0], ends
    found = json.loads(file.read_text())["devices"]
    assert list(found) == ["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
    names = [[result["name"] for result in each["results"]] for each in found.values()]
    assert names[0] == names[1] != []
    assert "h1/numpy:cpu:0: " in ends["h0"].words


def table(hosts: int) -> dict[str, Any]:
    """Return trainings for a number of hosts."""
    everyone = "".join(map(str, range(hosts)))
    shares = [tuple(map(float, range(hosts, 0, -1)))]
    replicas = {"members": [everyone], "shares": shares, "samples": 24, "clip_norm": 0.1}
    turns = {"members": everyone * 2, "schedule": "interleaved", "clip_norm": 0.1}
    turns["microbatches"] = hosts
    return {
        "digits 1f1b": {"model": "digits", "members": everyone},
        "digits replicas": {"model": "digits", **replicas},
        "gpt interleaved": {"model": "gpt2-small", **turns},
        "gpt pipedream": {"model": "gpt2-small", "members": everyone, "schedule": "pipedream"},
        "bert 1f1b": {"model": "bert", "members": everyone, "clip_norm": 0.1},
        "bert pipedream": {"model": "bert", "members": everyone, "schedule": "pipedream"},
        "bert replicas": {"model": "bert", **replicas},
    }


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("hosts", "line", "transport"),
    [
        (2, "1 Gb/s, 5 ms", "auto"),
        (2, "1 Gb/s, 5 ms", "tls"),
        (3, "10 Gb/s, 0.2 ms", "auto"),
        (4, "1 Gb/s, 1 ms, 1 % lost", "tls"),
    ],
)
def test_losses_over_emulated_lines_are_those_of_one_host(
    tmp_path: Path, variables: None, hosts: int, line: str, transport: str
) -> None:
    cases = table(hosts)
    with network(hosts, tmp_path, LINES[line]) as net:
        far = finish(net, tmp_path, start(net, tmp_path, cases, transport), 500.0)
    near = hosted.on_one_host(hosts, cases, available_cores())
    for name, case in far.items():
        print(
            f"{hosts} hosts, {line}, {transport}, {name}: {1e3 * case['step_s']:.0f} ms per step, "
            f"on one host {1e3 * near[name]['step_s']:.0f} ms"
        )
    assert numbers(far) == numbers(near)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_of_three_hosts_continues_on_two_and_on_one(
    tmp_path: Path, variables: None
) -> None:
    saved = str(tmp_path / "saved")
    whole = {"model": "bert", "members": "012", "samples": 24}
    begin = {**whole, "steps": (0, 2), "save": saved}
    rest = {**whole, "steps": (2, hosted.STEPS), "resume": saved}
    with network(3, tmp_path) as net:
        finish(net, tmp_path, start(net, tmp_path, {"begin": begin}))
    with network(2, tmp_path) as net:
        two = finish(net, tmp_path, start(net, tmp_path, {"rest": {**rest, "members": "01"}}))
    cases = {"whole": whole, "same": rest, "one": {**rest, "members": "0"}}
    here = hosted.on_one_host(3, cases, available_cores())
    expected = here["whole"]["losses"][2:]
    assert here["same"]["losses"] == expected
    assert two["rest"]["losses"] == pytest.approx(expected, rel=1e-6)
    assert here["one"]["losses"] == pytest.approx(expected, rel=1e-6)
