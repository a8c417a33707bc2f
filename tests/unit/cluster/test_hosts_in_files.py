"""Hosts in a cluster file: their members, and faults with file, line and names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hetpipe.cluster import Cluster, Link, Member, Server, Topology
from hetpipe.crew.crew import Crew
from hetpipe.errors import ClusterError

FILE = """\
[[host]]
name = "a"
inside = { bandwidth = "10 GB/s" }

[[host]]
name = "b"

[[device]]
host = "a"
device = "soft:cpu:0"
cores = [4096]

[[device]]
host = "b"
board = "t4"
count = 2

[[device]]
host = "a"
id = "card"
board = "t4"

[network]
bandwidth = "10 Gb/s"

[[link]]
between = ["b/t4.0", "a/card"]
latency = "1 ms"
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "lab.toml"
        path.write_text(text)
        return path

    return write


def test_hosts_are_servers_and_come_first_in_the_ids(write: Callable[[str], Path]) -> None:
    """Another host's cores are not checked here."""
    path = write(FILE)
    cluster = Cluster.load(path)
    t4s = tuple(
        Member(f"{host}/{id}", "", board="t4", server=host, host=host)
        for host, id in (("b", "t4.0"), ("b", "t4.1"), ("a", "card"))
    )
    assert cluster == Cluster(
        (Member("a/soft:cpu:0", "soft:cpu:0", (4096,), server="a", host="a"), *t4s),
        {frozenset(("a/card", "b/t4.0")): Link(1e-3, None)},
        servers=(Server("a", Topology(0.0, 1e10), True), Server("b", None, True)),
        network=Topology(0.0, 1.25e9),
    )
    assert cluster.groups() == (("a/soft:cpu:0", "a/card"), ("b/t4.0", "b/t4.1"))
    assert cluster.link("a/card", "b/t4.0") == Link(1e-3, 1.25e9)
    assert cluster.places["a/card"] == f"{path}:21"


def test_no_worker_starts_before_the_hosts_have_met(write: Callable[[str], Path]) -> None:
    attached = 'board = "t4"\nnumerics = "soft:cpu:0"'
    cluster = Cluster.load(write(FILE.replace('board = "t4"', attached)))
    with pytest.raises(ClusterError, match=r"hosts a, b have not met: .*load_hosts, .* torchrun"):
        Crew.start(cluster)


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('name = "b"', 'name = "a"', 6, r"host\.1\.name is 'a', but another host is 'a'"),
        ('name = "b"', 'name = "A"', 6, r"host\.1\.name is 'A', but another host is 'a'"),
        ('name = "b"', 'name = "b/c"', 6, r"host\.1\.name is wrong: 'b/c' is no name of a host"),
        ('host = "b"', 'host = "B"', 14, r"device\.1\.host names no host: 'B'; .*known: a, b"),
        ('host = "b"\n', "", 13, r"device\.1 has no host, .* write one of a, b as its host"),
        ('host = "b"', 'host = "a"', 5, r"host\.1 has no \[\[device\]\] table, so .*load_hosts"),
        ('"card"', '"a/card"', 20, r"device\.2\.id is 'a/card', and the host would come before"),
        ('"b/t4.0", "a/card"', '"a/card", "a/card"', 27, "a link joins two different devices"),
        ('"b/t4.0"', '"b"', 27, r"between\.0 names host b, but a link joins .*; write b/DEVICE"),
        ('"b/t4.0"', '"t4.0"', 27, r"between\.0 names no device: 't4\.0'; did you mean b/t4\.0"),
        ("count = 2", 'server = "s"\n[[server]]\nname = "s"', 16, "is 's', but the device is in"),
        ("[network]", '[[server]]\nname = "a"\n[network]', 24, r"'a': a host and a server have"),
    ],
)  # fmt: skip
def test_faults_point_at_the_line(
    write: Callable[[str], Path], old: str, new: str, line: int, message: str
) -> None:
    assert old in FILE
    path = write(FILE.replace(old, new, 1))
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")


def test_a_link_to_a_host_whose_devices_are_not_named(write: Callable[[str], Path]) -> None:
    text = FILE.replace("[network]", '[[host]]\nname = "c"\n\n[network]')
    path = write(text.replace('"b/t4.0"', '"c/soft:cpu:0"'))
    with pytest.raises(ClusterError, match=r"toml:30: .*but host c has no \[\[device\]\] table"):
        Cluster.load_hosts(path, "127.0.0.1")
    with pytest.raises(ClusterError, match=r"toml:1: .* has no host; give each a \[\[host\]\]"):
        Cluster.load_hosts(write('[[device]]\nboard = "t4"\n'), "127.0.0.1")
