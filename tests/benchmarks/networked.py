"""Predicted against measured steps over hosts with a network between them.

    python -m benchmarks.networked HOSTS LINE [MODEL] [PLANS]

The hosts are network namespaces of this machine. A LINE such as `1gbit` is a token bucket of the
kernel, for all that a host sends. A LINE such as `400 Mb/s, 5 ms` is emulated by a switch in
software. Paced devices take modelled times (`benchmarks.paced`). The plans are drawn at random:
cuts, orders of devices, replicas, schedules, and numbers of micro-batches. Needs root. Run it with
PYTHONPATH=tests:tests/engine:tests/support.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from itertools import permutations
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

from benchmarks.accuracy import COUNTS, HALF_S, SAMPLES, TORCH, steps_of
from benchmarks.paced import PacedTorch
from hetpipe.capture.captured import Captured
from hetpipe.cluster.cluster import Cluster
from hetpipe.cluster.member import available_cores
from hetpipe.cluster.units import parse_link
from hetpipe.cost.table import CostTable
from hetpipe.crew.crew import Crew
from hetpipe.errors import HetpipeError
from hetpipe.hosts.meeting import parse_address
from hetpipe.pipeline.pipeline import Pipeline
from hetpipe.plan.plan import Plan
from hetpipe.plan.planners.auto import plan as planned
from hetpipe.plan.priced import Priced
from hetpipe.plan.proposal import PlannerOptions, Proposal, Tables
from hetpipe.profile.cache import fresh_costs
from hetpipe.profile.measure import profile
from hetpipe.schedule.rule import is_asynchronous
from hetpipe.sdk.host.registry import register_backend
from hetpipe.train.training import one_thread, train
from hetpipe.zoo.load import load_workload, optimizer_of
from hetpipe.zoo.workload import Workload

PACES = "even", "slow", "memory"
BEGUN, STREAM = 4, 12
"""Mini-batches of a short and of a long run of an asynchronous plan."""
LIMIT_S = 60.0
"""Seconds in which the hosts end, after the last plan."""
FASTEST = 3.0
"""A drawn plan is predicted to take at most this multiple of the fastest one."""


def main(hosts: str, line: str, model: str = "gpt", plans: str = "20") -> None:
    """Start the hosts, and print what the first of them prints."""
    networks = import_module("networks")  # of tests/support, where checks of types do not look
    link = parse_link(line) if "," in line else None
    shape = networks.Line(link.bandwidth_Bps, link.latency_s) if link else networks.Shape(line)
    with (
        TemporaryDirectory() as folder,
        networks.network(int(hosts), Path(folder), shape) as net,
    ):
        meeting = f"{net.address('h0')}:29400"
        started = {
            host: net.start(
                host, sys.executable, "-m", "benchmarks.networked", host, meeting, hosts, model,
                plans, HETPIPE_SECRET="a secret of the tests alone",
            )
            for host in net.hosts
        }  # fmt: skip
        for line in started["h0"].stdout:
            print(line, end="", flush=True)
        for host, end in net.wait(started, LIMIT_S).items():
            print(f"--- {host}: {end.status}\n{end.words}", flush=True)


def run_host(host: str, meeting: str, hosts: str, model: str, plans: str) -> None:
    """Serve as an agent, or on the first host compare plans."""
    register_backend(PacedTorch)
    if host != "h0":
        sys.exit(import_module("hetpipe.crew.agent").serve_once(parse_address(meeting), host, 120))
    devices = [f"h{n}/paced-pytorch:{PACES[n % 3]}:{TORCH}" for n in range(int(hosts))]
    cluster, cores = (
        Cluster.hosts(meeting, int(hosts), devices=devices, name=host),
        available_cores(),
    )
    members = enumerate(cluster.members)  # each host would use all cores of this machine
    pinned = tuple(replace(each, cores=(cores[n % len(cores)],)) for n, each in members)
    compare(replace(cluster, members=pinned), model, int(plans))


def compare(cluster: Cluster, model: str, count: int) -> None:
    """Print predicted and measured steps of the planner's and of drawn plans."""
    workload, samples = load_workload(model), SAMPLES[model]
    example = next(workload.batches(samples, 0))
    first = -(-samples // COUNTS[0])
    captured = Captured(workload.model, workload.loss_fn, example, samples=first)
    errors, found = [], []
    with one_thread(), fresh_costs(), Crew.start(cluster) as crew:
        sizes = sorted({1, samples, *(-(-samples // each) for each in COUNTS)})
        tables = profile(captured, crew, optimizer_of(workload), sizes, print, half_s=HALF_S)
        for (source, target), link in tables[first].links.items():
            print(f"{source} -> {target}: {link}", flush=True)
        auto = planned(tables, cluster, PlannerOptions(samples, COUNTS))
        for plan in (auto, *drawn(tables, cluster, samples, count)):
            costs = tables[-(-samples // plan.microbatches)]
            measured_s = measured_step_s(workload, captured, crew, plan, costs)
            errors.append(plan.step_s / measured_s - 1)
            if not is_asynchronous(plan.schedule):  # `auto` chooses among plans that flush
                found.append(measured_s)
            groups = [[name.partition("/")[0] for name in stage.devices] for stage in plan.stages]
            print(
                f"{plan.schedule} x {plan.microbatches}, cuts {list(plan.cuts)}, {groups}: "
                f"predicted {1e3 * plan.step_s:.1f} ms, measured {1e3 * measured_s:.1f} ms, "
                f"{100 * errors[-1]:+.1f} %",
                flush=True,
            )
    absolute = sorted(map(abs, errors))
    print(
        f"{len(errors)} plans: median error {100 * statistics.median(absolute):.1f} %, worst "
        f"{100 * absolute[-1]:.1f} %; auto over the best plan that flushes "
        f"{found[0] / min(found):.3f}"
    )


def measured_step_s(
    workload: Workload, captured: Captured, crew: Crew, plan: Plan, costs: CostTable
) -> float:
    """Return the seconds of a step; of a plan without flushes, the seconds between updates."""
    if not is_asynchronous(plan.schedule):
        return statistics.median(steps_of(workload, captured, crew, plan, costs)[1])
    example = next(workload.batches(plan.mini_batch, 0))
    with Pipeline(
        workload.model, workload.loss_fn, example, cluster=crew.cluster, crew=crew,
        optimizer=optimizer_of(workload), plan=plan, costs=costs, captured=captured,
    ) as pipe:  # fmt: skip
        runs_s = []
        for length in (BEGUN, BEGUN, STREAM):  # the first one warms up
            begin_s = monotonic()
            for _ in train(workload, pipe, length, seed=0):
                pass
            runs_s.append(monotonic() - begin_s)
    return (runs_s[2] - runs_s[1]) / (STREAM - BEGUN)


def drawn(tables: Tables, cluster: Cluster, samples: int, count: int) -> Iterator[Plan]:
    """Yield different plans, drawn at random."""
    draw, priced, seen = random.Random(0), Priced(tables, PlannerOptions(samples, COUNTS)), set()
    layers = len(tables[min(tables)].layers)
    fastest = planned(tables, cluster, PlannerOptions(samples, COUNTS)).step_s
    limit_s = FASTEST * fastest
    orders = list(permutations(cluster.ids))
    for _ in range(200 * count):
        order, schedule = draw.choice(orders), draw.choice(("1f1b", "gpipe", "pipedream"))
        groups: list[tuple[str, ...]] = [(member,) for member in order]
        if draw.random() < 0.3 and not is_asynchronous(schedule):  # two replicas of one stage
            place = draw.randrange(len(groups) - 1)
            groups[place : place + 2] = [groups[place] + groups[place + 1]]
        cuts = tuple(sorted(draw.sample(range(1, layers), len(groups) - 1)))
        proposal = Proposal(cuts, tuple(groups), schedule, draw.choice(COUNTS))
        if proposal in seen:
            continue
        seen.add(proposal)
        try:
            plan = priced.plan(proposal, "drawn")
        except HetpipeError:
            continue  # the devices cannot run this plan
        if plan.step_s < limit_s:
            yield plan
            count -= 1
        if not count:
            return


if __name__ == "__main__":
    run = run_host if sys.argv[1].startswith("h") else main
    run(*sys.argv[1:])
