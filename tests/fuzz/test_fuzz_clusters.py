"""Cluster files: errors name file and line, and a cluster that is read can answer all questions."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
from damage import changed, spoilt
from fuzzing import ACCEPTED, REFUSED, check_both_ends, outcomes, result_of
from hypothesis import strategies as st
from invented import toml, values

from hetpipe.cluster import cluster_file, file_tables
from hetpipe.cluster.cluster import Cluster
from hetpipe.cost import board
from hetpipe.errors import ClusterError

PAPERS = Path(cluster_file.__file__).with_name("papers")
ATTACHED = b"""\
transport = "shared-memory"

[[device]]
id = "slow"
device = "soft:cpu:0"
cores = [0]
speed = 0.5

[[device]]
device = "soft:board:7"

[[link]]
between = ["soft:board:7", "slow"]
bandwidth = "1 Gb/s"
latency = "1 ms"
"""
HOSTS = b"""\
[[host]]
name = "a"

[[host]]
name = "b"

[[device]]
host = "a"
device = "soft:cpu:0"

[[device]]
host = "b"
id = "slow"
device = "soft:cpu:0"
cores = [4096]

[[link]]
between = ["a/soft:cpu:0", "b/slow"]
latency = "1 ms"
"""
FILES = [ATTACHED, HOSTS, *(path.read_bytes() for path in sorted(PAPERS.glob("*.toml")))]
AMOUNTS = st.sampled_from(["1", "0", "2.5", "1e3", "1e-3", "1e999", "9" * 400, "-1", "", "nan"])
UNITS = st.sampled_from(["Gb/s", "MiB/s", "b/s", "Kib/s", "ms", "s", "ns", "", "b", "Gb/s Gb/s"])
SPEEDS = st.tuples(AMOUNTS, st.sampled_from(["", " ", " " * 50_000]), UNITS).map("".join)
TEXTS = {
    file_tables.parse_bandwidth: st.sampled_from(["1 Gb/s", "2.5 kB/s"]) | SPEEDS,
    file_tables.parse_time: st.sampled_from(["1 ms", "0 s"]) | SPEEDS,
}
SOUND = {file_tables.parse_bandwidth: st.just("1 Gb/s"), file_tables.parse_time: st.just("1 ms")}


def fitted(tables: dict[str, Any]) -> dict[str, Any]:
    """Return tables that name each other's devices, servers and hosts, and an existing board."""
    servers = ["", *(f"s{number}" for number, _ in enumerate(tables["server"]))]
    for name, server in zip(servers[1:], tables["server"], strict=True):
        server |= {"name": name, "count": None}
    hosts = [f"h{number}" for number, _ in enumerate(tables["host"][: len(tables["device"])])]
    tables["host"] = [host | {"name": name} for host, name in zip(tables["host"], hosts)]  # noqa: B905
    for number, device in enumerate(tables["device"]):
        device |= {"id": f"d{number}", "board": "v100-pcie-16", "count": None}
        device["server"] = (not hosts and servers[number % len(servers)]) or None
        device["host"] = hosts[number % len(hosts)] if hosts else None
        for key in ("device", "cores", "speed"):
            del device[key]
    for link in tables["link"]:
        last = len(tables["device"]) - 1
        ends = (f"{hosts[n % len(hosts)]}/d{n}" if hosts else f"d{n}" for n in (0, last))
        link["between"] = list(ends)
    return tables


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetpipe.cluster.member.available_cores", lambda: (0, 1))
    board.board("v100-pcie-16")  # reads all boards, once


def attempt(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", cluster_file.BandwidthWarning)
        cluster = result_of(lambda: Cluster.load(path), (ClusterError,))
    if isinstance(cluster, str):
        assert re.match(r":\d+: ", cluster.removeprefix(str(path))), cluster
        return REFUSED
    pairs = [(one, other) for one in cluster.ids[:5] for other in cluster.ids[-5:]]
    result_of(lambda: [cluster.way(*pair) for pair in pairs], (ClusterError,))
    result_of(lambda: [cluster.link(*pair) for pair in pairs], (ClusterError,))
    result_of(lambda: (cluster.groups(), cluster.levels()), (ClusterError,))
    return ACCEPTED


def test_damaged(tmp_path: Path) -> None:
    files = spoilt(st.sampled_from(FILES))
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "c.toml", content)))


@pytest.mark.slow
def test_many_servers(tmp_path: Path) -> None:
    """Each count is within its bounds, but their sum may not be."""
    counts = st.lists(st.sampled_from([1, 7, 1000, 100_000, 100_001]), min_size=1, max_size=60)
    starts = st.sampled_from(["", "\ufeff"])

    def text(start: str, counts: list[int]) -> bytes:
        servers = (
            f'[[server]]\nname = "s{n}"\ncount = {count}\n' for n, count in enumerate(counts)
        )
        board = '[[device]]\nboard = "v100-pcie-16"\nserver = "s0"\n'
        return "".join([start, *servers, board]).encode()

    files = st.builds(text, starts, counts)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "c.toml", content)))


@pytest.mark.slow
def test_invented(tmp_path: Path) -> None:
    tables = values(file_tables.Tables, TEXTS)
    whole = values(file_tables.Tables, SOUND, strict=True).map(fitted)
    files = (tables | whole | changed(whole)).map(toml)
    check_both_ends(outcomes(files, lambda content: attempt(tmp_path / "c.toml", content)))
