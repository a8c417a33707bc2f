"""The overhead of several hosts: `python -m benchmarks.overhosts step digits gpt`.

All hosts are agents of this machine, on its loopback, so the figures have no network. `step` trains
with one plan on one host and on two hosts, on the same cores, in turns. `action` measures actions
that compute nothing. `controller 4 8 16` gives so many agents four devices each, and measures the
controller's part of a step, and the bytes of its connections. Run it as

    PYTHONPATH=tests:tests/engine:tests/support python -m benchmarks.overhosts step digits
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import hetpipe as hp
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import available_cores
from hetpipe.crew.crew import Crew
from hetpipe.hosts.tls import TlsStream
from hetpipe.papers.overhead import ROUNDS, empty_request, load_empty
from hetpipe.plan.plan import Plan
from hetpipe.profile.clock import spread_of
from hetpipe.schedule.generators import generate
from hetpipe.sdk.backend import Device
from hetpipe.wire.messages import Keep
from hetpipe.zoo.load import load_workload, optimizer_of

agents: Any = import_module("agents")  # of tests/engine, where checks of types do not look

PAIRS = 60
DEVICE = "pytorch:cpu:0"
EMPTY = "numpy:cpu:0"
"""The device of `controller`, which computes nothing."""
WORKERS = 4
"""Workers of each agent of `controller`."""
MICROBATCHES = 4


@contextmanager
def two_hosts(device: str = DEVICE) -> Iterator[tuple[Cluster, int]]:
    """Yield a cluster of a device of this process and one of an agent, and the agent's process."""
    address, cores = agents.free_address(), available_cores()
    agent = agents.start_agent("--meet", address, "--name", "b")
    with agents.patched_secret():
        devices = [f"a/{device}", f"b/{device}"]
        cluster = Cluster.hosts(address, 2, devices=devices, name="a", limit_s=120)
    pinned = (
        replace(member, cores=(cores[n % len(cores)],)) for n, member in enumerate(cluster.members)
    )
    try:
        yield replace(cluster, members=tuple(pinned)), agent.pid
    finally:
        assert cluster.connections is not None
        cluster.connections.close()
        agents.end(agent)


def cpu_s(_: Device) -> float:
    """Return the CPU seconds of a worker."""
    return float(time.process_time())


def used_s(crew: Crew, agent: int | None) -> float:
    """Return the CPU seconds of the controller, the agent and the workers."""
    own_s: float = time.process_time() + sum(
        crew.call(list(crew.infos), "benchmarks.overhosts:cpu_s")
    )
    if agent is not None:
        fields = Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()
        own_s += (int(fields[11]) + int(fields[12])) / 100
    return own_s


def moved(plan: Plan, names: Mapping[str, str]) -> Plan:
    """Return the same plan on other devices, by the names of the present ones."""
    stages = (
        replace(stage, devices=tuple(map(names.__getitem__, stage.devices)))
        for stage in plan.stages
    )
    return replace(plan, stages=tuple(stages))


def steps(model: str, pairs: int = PAIRS) -> None:
    """Print the time of a step on two hosts over its time on one host, in pairs."""
    workload = load_workload(model)
    x, y = next(workload.batches(workload.mini_batch, 0))
    with two_hosts() as (far, agent):
        members = [
            replace(m, id=f"{m.host} alone", host="", machine="", server="") for m in far.members
        ]
        near = Cluster(tuple(members))
        with Crew.start(near) as one, Crew.start(far) as two:
            optimizer, first = optimizer_of(workload), (workload.model, workload.loss_fn, (x, y))
            options: dict[str, Any] = {"cluster": near, "optimizer": optimizer}
            with hp.Pipeline(*first, crew=one, schedule="1f1b", **options) as pipe_one:
                plan = moved(pipe_one.plan, dict(zip(near.ids, far.ids, strict=True)))
                options["cluster"] = far
                with hp.Pipeline(*first, crew=two, plan=plan, **options) as pipe_two:
                    _compare(model, (pipe_one, one, None), (pipe_two, two, agent), (x, y), pairs)


def _compare(model: str, one: Any, two: Any, batch: Any, pairs: int) -> None:
    times_s: dict[int, list[float]] = {0: [], 1: []}
    busy_s = {0: 0.0, 1: 0.0}
    for pair in range(-3, pairs):
        for number in (0, 1) if pair % 2 else (1, 0):
            pipe, crew, agent = (one, two)[number]
            before_s, begin_s = used_s(crew, agent), time.perf_counter()
            pipe.step(*batch)
            took_s = time.perf_counter() - begin_s
            if pair >= 0:
                times_s[number].append(took_s)
                busy_s[number] += used_s(crew, agent) - before_s
    ratios = [far / near for near, far in zip(times_s[0], times_s[1], strict=True)]
    near_s, far_s = (statistics.median(times_s[n]) for n in (0, 1))
    print(
        f"{model:8} one host {1e3 * near_s:8.2f} ms, two hosts {1e3 * far_s:8.2f} ms, ratio of "
        f"pairs {statistics.median(ratios):.3f} (spread {spread_of(ratios):.3f}), least "
        f"{min(times_s[1]) / min(times_s[0]):.3f}, CPU {busy_s[1] / busy_s[0]:.3f}: "
        f"{1e3 * busy_s[0] / pairs:.2f} and {1e3 * busy_s[1] / pairs:.2f} ms",
        flush=True,
    )


def action(microbatches: int = 64) -> None:
    """Print the seconds of an empty action between hosts."""
    schedule = generate("1f1b", 2, microbatches)
    request = empty_request(schedule, microbatches)
    actions = max(len(row) for row in schedule)
    with two_hosts() as (cluster, agent):
        for transport in ("auto", "tcp", "tls"):
            with Crew.start(replace(cluster, transport=transport)) as crew:
                load_empty(crew, Keep())
                crew.step(request)
                begin_s = used_s(crew, agent)
                times_s = [crew.step(request).timeline.step_s for _ in range(3 * ROUNDS)]
                busy_s = used_s(crew, agent) - begin_s
            us = [1e6 * time_s / actions for time_s in times_s]
            print(
                f"empty action, {transport}: {statistics.median(us):.1f} us (least {min(us):.1f}), "
                f"{1e6 * busy_s / (len(us) * actions):.1f} us of CPU in all processes",
                flush=True,
            )


class Traffic:
    """Counts the bytes on the controller's connections, before encryption."""

    def __init__(self) -> None:
        self.sent = self.got = 0
        send, receive = TlsStream.sendall, TlsStream.receive_into

        def sendall(stream: TlsStream, data: Any) -> None:
            self.sent += len(data)
            send(stream, data)

        def receive_into(stream: TlsStream, view: memoryview) -> None:
            self.got += len(view)
            receive(stream, view)

        counted: Any = TlsStream
        counted.sendall, counted.receive_into = sendall, receive_into


def controller(counts: Sequence[int], rounds: int = 15) -> None:
    """Print the controller's CPU seconds and bytes of a step, by the number of agents."""
    traffic, found = Traffic(), []
    for count in counts:
        address = agents.free_address()
        names = [f"h{n}" for n in range(count)]
        started = [agents.start_agent("--meet", address, "--name", name) for name in names]
        devices = [f"{name}/{EMPTY}" for name in names for _ in range(WORKERS)]
        with agents.patched_secret():
            cluster = Cluster.hosts(address, count + 1, devices=devices, name="c", limit_s=300)
        try:
            with Crew.start(cluster, start_timeout_s=300) as crew:
                load_empty(crew, Keep())
                schedule = generate("1f1b", len(cluster.members), MICROBATCHES)
                request = empty_request(schedule, MICROBATCHES)
                busy_s, sent, got = [], [], []
                for _ in range(rounds):
                    before = time.process_time(), traffic.sent, traffic.got
                    crew.step(request)
                    busy_s.append(time.process_time() - before[0])
                    sent.append((traffic.sent - before[1]) / count)
                    got.append((traffic.got - before[2]) / count)
            middle = [statistics.median(each[1:]) for each in (busy_s, sent, got)]
            found.append((len(cluster.members), middle[0]))
            print(
                f"{count} agents, {len(cluster.members)} workers: {1e3 * middle[0]:.2f} ms of CPU, "
                f"{middle[1]:.0f} bytes to and {middle[2]:.0f} from each host, per step",
                flush=True,
            )
        finally:
            assert cluster.connections is not None
            cluster.connections.close()
            for agent in started:
                agents.end(agent)
    if len(found) > 1:
        slope = statistics.linear_regression(
            [math.log(workers) for workers, _ in found], [math.log(each_s) for _, each_s in found]
        ).slope
        print(f"the CPU seconds grow with the workers to the power of {slope:.2f}")


def main(kind: str, *words: str) -> None:
    if kind == "step":
        for model in words:
            steps(model)
    elif kind == "action":
        action()
    else:
        controller([int(word) for word in words])


if __name__ == "__main__":
    main(*sys.argv[1:])
