"""The sockets of a crew listen only on the loopback interface."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from crews import TRANSPORTS

from hetpipe.cluster import Cluster, Member
from hetpipe.crew.crew import Crew

LISTENS = "0A"  # the code of this state in /proc/net/tcp
LOOPBACKS = ("0100007F", "00000000000000000000000001000000")


def listening(process: int) -> Iterator[tuple[str, int]]:
    """Yield the addresses on which a process listens, as a hexadecimal number and a port."""
    names = (_target(file) for file in Path(f"/proc/{process}/fd").iterdir())
    inodes = {name[len("socket:[") : -1] for name in names if name.startswith("socket:[")}
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{process}/net/{table}")
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            _, address, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == LISTENS and inode in inodes:
                number, _, port = address.partition(":")
                yield number, int(port, 16)


def ports_of(process: int) -> set[int]:
    """Return the ports on which a process and its descendants listen."""
    ports = {port for _, port in listening(process)}
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        ports = ports.union(*map(ports_of, map(int, file.read_text().split())))
    return ports


def _target(file: Path) -> str:
    try:
        return os.readlink(file)
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_crew_listens_only_on_the_loopback(transport: str) -> None:
    before = list(listening(os.getpid()))
    members = tuple(Member(f"m{n}", "numpy:cpu:0") for n in range(2))
    with Crew.start(Cluster(members, transport=transport)) as crew:
        workers = crew.call(list(crew.infos), "engine_backends:pid")
        found = [address for pid in {os.getpid(), *workers} for address in listening(pid)]
        for address in before:
            found.remove(address)
        assert {number for number, _ in found} <= {*LOOPBACKS}
        assert len(found) == (3 if transport == "distributed" else 0)  # the store, and two of gloo
    assert list(listening(os.getpid())) == before
