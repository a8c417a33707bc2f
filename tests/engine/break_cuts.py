"""Cut a host off the network at random moments of its worker, and compare the results with an
undisturbed training's.

    python tests/engine/break_cuts.py [--lanes 3] [--end-s 600] [--skip 0] [--seed 0] [CASE ...]

Each member is a host, and a namespace of the network, so this needs root. Each action and each
command of the controller is a moment (`breaking.py`). `lanes` trainings run at the same time. No
training begins after `end_s`.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
FOLDERS = [str(HERE), str(HERE.parent), str(HERE.parent / "support")]
sys.path[:0] = FOLDERS
import broken_cases  # noqa: E402
from broken_cases import CASES, DEVICE, Break, Case, problems, run, undisturbed  # noqa: E402
from networks import Network, network  # noqa: E402

from hetpipe.cluster import Cluster  # noqa: E402
from hetpipe.crew.crew import Crew  # noqa: E402
from hetpipe.errors import ClusterError  # noqa: E402

CUT = "1f1b", "pipedream", "data-parallel"
"""The cases whose hosts are cut off by default."""
MOST_HOSTS = max(CASES[name].count for name in CUT)
PORT = 29401
FREE_S = 60.0
"""Seconds in which an agent sees that its host is on the network again, and that a training has
ended."""


@contextmanager
def started(net: Network, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Yield this script on the first host, with agents that stay on the others."""
    environment = {
        "HETPIPE_SECRET": "a secret of the tests alone",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), *FOLDERS]),
    }
    agents = []
    for host in net.hosts[1:]:
        address = f"{net.address(host)}:{PORT}"
        serve = sys.executable, "-m", "hetpipe", "agent", "--stay", "--listen", address
        command = "sh", "-c", 'exec "$@" > /dev/null 2>&1', "sh", *serve  # hours would fill a pipe
        unplug = " ".join(plug(net.switch, host, "down"))
        variables = {**environment, "HETPIPE_TEST_CUT": unplug}
        agents.append(net.start(host, *command, "--name", host, **variables))
    script = sys.executable, "-u", __file__, "--switch", net.switch, *arguments
    try:
        yield net.start(net.hosts[0], *script, **environment)
    finally:
        for host in net.hosts:
            net.kill(host)
        for agent in agents:
            agent.communicate()


def plug(switch: str, host: str, state: str) -> list[str]:
    """Return a command that plugs a host's cable into the switch ("up") or out of it ("down")."""
    return ["ip", "-n", switch, "link", "set", host, state]


@contextmanager
def crew_over_hosts(switch: str, case: Case) -> Iterator[Crew]:
    """Yield a crew whose members are one on each host."""
    hosts = [f"h{n}" for n in range(case.count)]
    for host in hosts[1:]:
        subprocess.run(plug(switch, host, "up"), check=True)
    cluster = meet(hosts)
    assert cluster.connections is not None
    members = {member.host: member for member in cluster.members}
    renamed = tuple(replace(members[host], id=f"m{n}") for n, host in enumerate(hosts))
    try:
        with Crew.start(replace(cluster, members=renamed)) as crew:
            yield crew
    finally:
        cluster.connections.close()


def meet(hosts: Sequence[str]) -> Cluster:
    """Return a cluster of hosts. An agent may still serve the training before."""
    end_s = time.monotonic() + FREE_S
    while True:
        try:
            return Cluster.hosts(
                agents=[f"{host}:{PORT}" for host in hosts[1:]],
                devices=[f"{host}/{DEVICE}" for host in hosts],
                name=hosts[0],
                transport="tcp",
                limit_s=120,
            )
        except ClusterError:
            if time.monotonic() > end_s:
                raise
            time.sleep(1.0)


def cut(chosen: argparse.Namespace) -> int:
    """Run trainings on the hosts of this namespace's network."""
    logging.disable()
    end_s, lane = time.monotonic() + chosen.end_s, chosen.lane
    broken_cases.make_crew = partial(crew_over_hosts, chosen.switch)
    failures, waits_s, found_s = 0, list[float](), list[float]()
    for name in chosen.cases or CUT:
        breaks = [
            Break(member, "cut", moment)
            for member in CASES[name].used[1:]
            for moment in range(len(undisturbed(name).moments[member]))
        ]
        random.Random(f"{chosen.seed} {name}").shuffle(breaks)
        for place in breaks[lane :: chosen.lanes][chosen.skip :][: chosen.most]:
            if time.monotonic() > end_s:
                break
            took = ""
            try:
                found = run(CASES[name], [place])
                texts = problems(name, found, [place])
                waits_s.append(found.wait_s)
                found_s.append(found.wait_s - sum(event.took_s for event in found.lost))
                took = f"found {found_s[-1]:.1f} s, next result {waits_s[-1]:.1f} s"
            except Exception as error:
                texts = [f"{type(error).__name__}: {error}"]
            failures += bool(texts)
            words = f"FAILED {'; '.join(texts)[:500]}" if texts else ""
            print(f"{name} {place.member} {place.moment} of {len(breaks)}: {took} {words}")
    if waits_s:
        print(
            f"{len(waits_s)} cuts: the loss was found after {statistics.median(found_s):.1f} s, "
            f"and the next result came after {statistics.median(waits_s):.1f} s (medians; at most "
            f"{max(found_s):.1f} and {max(waits_s):.1f} s)"
        )
    print(f"{failures} failures")
    return int(failures > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--lanes", type=int, default=3)
    parser.add_argument("--lane", type=int, default=0, help="of the script in a namespace")
    parser.add_argument("--switch", help="of the script in a namespace")
    parser.add_argument("--end-s", type=float, default=600.0)
    parser.add_argument("--most", type=int, help="trainings of a case and lane")
    parser.add_argument("--skip", type=int, default=0, help="as many of them are run elsewhere")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    if chosen.switch:
        return cut(chosen)
    with ExitStack() as stack:
        lanes = []
        for lane in range(chosen.lanes):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            net = stack.enter_context(network(MOST_HOSTS, Path(folder)))
            lanes.append(stack.enter_context(started(net, "--lane", lane, *sys.argv[1:])))
        with ThreadPoolExecutor(len(lanes)) as pool:
            return int(any([*pool.map(show, lanes)]))


def show(process: subprocess.Popen[str]) -> int:
    """Print what a lane prints, as it comes. Return its status."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
    return process.wait()


if __name__ == "__main__":
    sys.exit(main())
