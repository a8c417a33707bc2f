"""Several hosts on this machine: network namespaces with a network between them.

The hosts `h0`, `h1`, ... have separate interfaces, names and hosts files. Nothing reaches the
machine's own interfaces.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations, count
from pathlib import Path

import pytest
import switch

_NUMBERS = count()
_ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'


@dataclass(frozen=True)
class Line:
    """The line of each host to the switch: emulated, in both directions."""

    rate_Bps: float
    delay_s: float
    loss: float = 0.0


@dataclass(frozen=True)
class Shape:
    """Token buckets: a single one for all that a host sends, or one for each pair of hosts."""

    rate: str
    per_pair: bool = False


class Network:
    """Hosts with a network between them."""

    def __init__(self, prefix: str, hosts: Sequence[str], folder: Path) -> None:
        self.hosts = hosts
        self._prefix, self._folder = prefix, folder
        self._addresses = {host: f"10.213.0.{n}" for n, host in enumerate(hosts, 1)}
        self.name_addresses(self._addresses)

    def name_addresses(self, addresses: Mapping[str, str]) -> None:
        """Write the hosts file of all hosts."""
        lines = ["127.0.0.1 localhost", *(f"{ip} {name}" for name, ip in addresses.items())]
        for each in self.hosts:
            (self._folder / f"{each}.hosts").write_text("\n".join(lines) + "\n")

    @property
    def switch(self) -> str:
        """The namespace of the bridge that joins the hosts."""
        return f"{self._prefix}-switch"

    def namespace(self, host: str) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: str) -> str:
        return self._addresses[host]

    def address6(self, host: str) -> str:
        return f"fd00:213::{self.hosts.index(host) + 1}"

    def command(self, host: str, *command: object) -> list[str]:
        """Return a command that runs another one on a host."""
        names = str(self._folder / f"{host}.hosts")
        return [
            *("ip", "netns", "exec", self.namespace(host)),
            *("unshare", "--uts", "--mount", "sh", "-c", _ENTER, host, names),
            *map(str, command),
        ]

    def start(self, host: str, *command: object, **variables: str) -> subprocess.Popen[str]:
        """Start a command on a host; both its outputs go to one pipe."""
        return subprocess.Popen(
            self.command(host, *command),
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, host: str, *command: object, **variables: str) -> str:
        """Run a command on a host, and return what it prints. It must succeed."""
        done = subprocess.run(
            self.command(host, *command), env={**os.environ, **variables}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start_torchrun(
        self, *command: object, **variables: str
    ) -> dict[str, subprocess.Popen[str]]:
        """Start a command by torchrun on all hosts, which meet at the first one."""
        variables.setdefault("HETPIPE_SECRET", "a secret of the tests alone")
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", len(self.hosts)),
            *("--nproc-per-node", 1, "--rdzv-backend", "c10d"),
            *("--rdzv-endpoint", f"{self.hosts[0]}:29500"),
        ]
        return {host: self.start(host, *torchrun, *command, **variables) for host in self.hosts}

    def wait(
        self, started: Mapping[str, subprocess.Popen[str]], limit_s: float
    ) -> dict[str, Ended]:
        end_s = time.monotonic() + limit_s
        ends = {}
        for host, process in started.items():
            try:
                words, _ = process.communicate(timeout=max(end_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.kill(host)
                words, _ = process.communicate()
            ends[host] = Ended(process.returncode, words)
        return ends

    def kill(self, host: str) -> None:
        """Kill all processes on a host."""
        found = _ip("netns", "pids", self.namespace(host), check=False).split()
        for process in map(int, found):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)


@dataclass(frozen=True)
class Ended:
    """The end of a command: its status, and what it has printed."""

    status: int
    words: str


@contextmanager
def network(number: int, folder: Path, line: Line | Shape | None = None) -> Iterator[Network]:
    """Yield a network of hosts; at the end kill their processes, and remove it.

    A `Line` is emulated by a switch in software, a `Shape` by the kernel. Without either, the
    network is as fast as the machine. Skips the test where the system allows no namespaces.
    """
    if reason := _refusal(line):
        pytest.skip(reason)
    prefix = f"hetpipe-{os.getpid()}-{next(_NUMBERS)}"
    net = Network(prefix, [f"h{n}" for n in range(number)], folder)
    joined: subprocess.Popen[str] | None = None
    try:
        for host in net.hosts:
            _ip("netns", "add", net.namespace(host))
        for host in net.hosts:
            _ip("-n", net.namespace(host), "link", "set", "lo", "up")
        if isinstance(line, Line):
            joined = _join_by_switch(net, line)
        elif line is None or not line.per_pair:
            _join_by_bridge(net)
        else:
            _join_in_pairs(net, line)
        for host in (
            net.hosts if line is None or isinstance(line, Line) or not line.per_pair else ()
        ):
            inside = ("-n", net.namespace(host))
            _ip(*inside, "address", "add", f"{net.address(host)}/24", "dev", "eth0")
            _ip(*inside, "address", "add", f"{net.address6(host)}/64", "dev", "eth0", "nodad")
            _ip(*inside, "link", "set", "eth0", "up")
            if isinstance(line, Shape):
                _shape(net.namespace(host), "eth0", line.rate)
        yield net
    finally:
        for host in net.hosts:
            net.kill(host)
        if joined is not None:
            joined.communicate()
        for name in (*map(net.namespace, net.hosts), net.switch):
            _ip("netns", "delete", name, check=False)


def _refusal(line: Line | Shape | None) -> str:
    """Return why this machine cannot have such a network, or ""."""
    if os.geteuid():
        return "network namespaces need root"
    if missing := [tool for tool in ("ip", "ss", "unshare") if not shutil.which(tool)]:
        return f"{missing[0]} is not installed"
    if isinstance(line, Shape) and not shutil.which("tc"):
        return "tc is not installed"
    if isinstance(line, Line) and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "emulated lines need /dev/net/tun"
    name = f"hetpipe-{os.getpid()}-trial"
    try:
        _ip("netns", "add", name)
    except AssertionError as error:
        return f"this system allows no network namespaces: {error}"
    _ip("netns", "delete", name)
    return ""


def _join_by_bridge(net: Network) -> None:
    """Join the hosts by a bridge in a further namespace."""
    _ip("netns", "add", net.switch)
    _ip("-n", net.switch, "link", "add", "br0", "type", "bridge")
    _ip("-n", net.switch, "link", "set", "br0", "up")
    for host in net.hosts:
        _ip(
            *("-n", net.namespace(host), "link", "add", "eth0", "type", "veth"),
            *("peer", "name", host, "netns", net.switch),
        )
        _ip("-n", net.switch, "link", "set", host, "master", "br0", "up")


def _join_in_pairs(net: Network, shape: Shape) -> None:
    """Join each pair of hosts by a separate line."""
    for one, other in combinations(net.hosts, 2):
        _ip(
            *("-n", net.namespace(one), "link", "add", other, "type", "veth"),
            *("peer", "name", one, "netns", net.namespace(other)),
        )
        for here, there in ((one, other), (other, one)):
            inside, address = ("-n", net.namespace(here)), net.address(here)
            _ip(*inside, "address", "add", f"{address}/32", "dev", there)
            _ip(*inside, "link", "set", there, "up")
            _ip(*inside, "route", "add", f"{net.address(there)}/32", "dev", there, "src", address)
            _shape(net.namespace(here), there, shape.rate)


_TCP = "net.ipv4.tcp_congestion_control=reno", "net.ipv4.tcp_limit_output_bytes=131072"
"""As on usual hosts: short queues before a card, so that answers do not wait behind data."""


def _shape(namespace: str, device: str, rate: str) -> None:
    _run("ip", "netns", "exec", namespace, "sysctl", "-qw", *_TCP)
    bucket = ("tbf", "rate", rate, "burst", "32kb", "latency", "100ms")
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *bucket)


def _join_by_switch(net: Network, line: Line) -> subprocess.Popen[str]:
    figures = line.rate_Bps, line.delay_s, line.loss
    started = subprocess.Popen(
        [sys.executable, switch.__file__, *map(str, figures), *map(net.namespace, net.hosts)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def _ip(*arguments: str, check: bool = True) -> str:
    return _run("ip", *arguments, check=check)


def _run(*command: str, check: bool = True) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stderr.strip()
    return done.stdout
