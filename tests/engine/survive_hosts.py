"""Break a host of a training that survives, and print how long it takes to go on.

    python tests/engine/survive_hosts.py [--model digits] [--hosts 3] [--schedule 1f1b] [EVENT ...]

The hosts h0 (controller), h1, ... are network namespaces, joined at 1 Gb/s, so this needs root. The
training must end with each result once, and with the losses and weights of an undisturbed one. An
asynchronous training must equal one that changes its plan after the same mini-batch.
`--options '{"cuts": [3], "replicas": [2, 1]}'` gives options of the pipeline.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
import torch  # noqa: E402
from break_hosts import H0, H1, Run, fill_disks_of_agent, send_signal  # noqa: E402
from crews import eventually  # noqa: E402
from networks import Network, Shape, network  # noqa: E402

import hetpipe as hp  # noqa: E402
from hetpipe.cluster.member import Member  # noqa: E402
from hetpipe.plan.plan_file import read_plan  # noqa: E402
from hetpipe.zoo.load import load_workload  # noqa: E402

LIMIT_S = 1200.0
DEVICE = "numpy:cpu:0"
NEAR = 1e-6
"""The most that losses, as shares, and weights may differ."""
BREAK_AT = 8
"""The mini-batch after whose result a host is broken."""
PHASES = "close", "launch", "open", "plan", "load", "replay"
TRAIN = """
import itertools, json, logging, sys, time
from pathlib import Path
import torch
import hetpipe as hp
from hetpipe.crew.crew import Crew
from hetpipe.crew.workers import Workers
from hetpipe.pipeline import survival, survivors
from hetpipe.pipeline.journal import Recorded
from hetpipe.plan.plan_file import write_plan
from hetpipe.zoo.load import load_workload

model, way, count, folder, samples, transport, options = sys.argv[1:]
logging.basicConfig(format="%(message)s")

def phase(place, name, words):
    call = getattr(place, name)
    def timed(*args, **options):
        begin_s = time.monotonic()
        try:
            return call(*args, **options)
        finally:
            print("phase", words, begin_s, time.monotonic(), flush=True)
    setattr(place, name, timed)

phase(survival.Survival, "_remove_lost", "close")
phase(Crew, "start", "launch")
phase(Workers, "_await_devices", "open")
phase(survivors, "plan_for", "plan")
phase(Recorded, "renew", "load")
phase(Recorded, "replay", "replay")
if way.endswith(".toml"):
    cluster = hp.Cluster.load_hosts(way, meet="10.213.0.1:29400", name="h0", limit_s=60)
else:
    where = {} if way == "torchrun" else {"meet": way, "count": int(count), "name": "h0"}
    devices = [f"h{n}/numpy:cpu:0" for n in range(int(count))]
    cluster = hp.Cluster.hosts(**where, limit_s=60, devices=devices, transport=transport)
torch.manual_seed(0)
work = load_workload(model)
batches = list(itertools.islice(work.batches(int(samples), 0), 16))
options = {**json.loads(options), "optimizer": work.optimizer or hp.optim.sgd(lr=0.01)}
options |= {"survive": "auto", "snapshot_every": 4}
with hp.Pipeline(work.model, work.loss_fn, batches[0], cluster=cluster, **options) as pipe:
    print(pipe.plan)
    plans = [pipe.plan]
    for result in pipe.run(batches):
        print("result", result.index, time.monotonic(), result.loss, flush=True)
        time.sleep(0.1)
    torch.save(pipe.state_dict(), Path(folder, "weights.pt"))
    for lost in pipe.lost:
        print("lost", ",".join(lost.members), lost.step - lost.replayed, lost.why)
        plans.append(lost.plan)
    for number, plan in enumerate(plans):
        write_plan(Path(folder, f"plan-{number}.json"), plan, None)
    print("done", flush=True)
"""
CLUSTER = """
[[host]]
name = "{0}"
[[device]]
host = "{0}"
device = "numpy:cpu:0"
"""


class Event(NamedTuple):
    """A loss. `members` are what must be lost, `way` is how the hosts meet."""

    happen: Callable[[Run], object]
    members: str = "h1/numpy:cpu:0"
    way: str = "meet"


def _ip(run: Run, host: str, *words: str) -> None:
    subprocess.run(["ip", "-n", run.net.namespace(host), *words], check=True)


def _cut(run: Run) -> None:
    _ip(run, H1, "link", "set", "eth0", "down")


def _cut_in_silence(run: Run) -> None:
    """Drop all that h1 sends; h1 itself sees an interface that is up."""
    for host in run.net.hosts:
        if host != H1:
            _ip(run, H1, "route", "add", "blackhole", run.net.address(host))


def _cut_link(run: Run) -> None:
    """Drop all between h1 and the last host."""
    last = run.net.hosts[-1]
    _ip(run, H1, "route", "add", "blackhole", run.net.address(last))
    _ip(run, last, "route", "add", "blackhole", run.net.address(H1))


def _plug_in_again(run: Run) -> None:
    _cut(run)
    time.sleep(8.0)
    _ip(run, H1, "link", "set", "eth0", "up")


def _continue_later(run: Run) -> None:
    send_signal(signal.SIGSTOP, H1, "main")(run)
    time.sleep(4.0)
    send_signal(signal.SIGCONT, H1, "main")(run)


EVENTS = {
    "kill-worker": Event(send_signal(signal.SIGKILL, H1, "worker")),
    "kill-agent": Event(send_signal(signal.SIGKILL, H1, "main")),
    "stop-worker": Event(send_signal(signal.SIGSTOP, H1, "worker")),
    "stop-agent": Event(send_signal(signal.SIGSTOP, H1, "main")),
    "cut": Event(_cut),
    "silent-cut": Event(_cut_in_silence),
    "switch-off": Event(lambda run: (_cut(run), run.net.kill(H1))),
    "plug-in-again": Event(_plug_in_again),
    "continue-later": Event(_continue_later),
    "cut-link": Event(_cut_link, "h2/numpy:cpu:0"),
    "full-agent": Event(fill_disks_of_agent, ""),
    "cluster-file": Event(lambda run: run.net.kill(H1), way="file"),
    "torchrun-agent": Event(lambda run: _kill_agent_under_torchrun(run), way="torchrun"),
    "torchrun": Event(lambda run: run.net.kill(H1), way="torchrun"),
}


def _kill_agent_under_torchrun(run: Run) -> None:
    """Kill the agent, and not its torchrun."""
    children = Path(f"/proc/{run.training[H1].pid}/task/{run.training[H1].pid}/children")
    subprocess.run(["kill", "-KILL", *children.read_text().split()], check=True)


@contextmanager
def _running(chosen: argparse.Namespace, way: str) -> Iterator[Run]:
    """Yield a training over hosts."""
    with (
        tempfile.TemporaryDirectory() as name,
        network(chosen.hosts, Path(name), Shape("1gbit")) as net,
    ):
        run = Run(net, {}, Path(name), f"{net.address(H0)}:29400")
        (run.folder / "cluster.toml").write_text("".join(map(CLUSTER.format, net.hosts)))
        (run.folder / "train.py").write_text(TRAIN)
        ways = {"meet": run.way, "file": run.folder / "cluster.toml", "torchrun": "torchrun"}
        arguments = (
            *(run.folder / "train.py", chosen.model, ways[way], chosen.hosts),
            *(run.folder, chosen.samples, chosen.transport, json.dumps(_options(chosen))),
        )
        for host in net.hosts:
            if way == "torchrun":
                command = *_torchrun(net), *arguments
            elif host == H0:
                command = sys.executable, *arguments
            else:
                agent = "-m", "hetpipe", "agent", "--meet", run.way, "--limit", 60, "--name", host
                command = sys.executable, *agent
            run.training[host] = run.start(host, host, *command)
        yield run


def _options(chosen: argparse.Namespace) -> dict[str, Any]:
    return {"microbatches": 4, "schedule": chosen.schedule, **json.loads(chosen.options)}


def _torchrun(net: Network) -> tuple[object, ...]:
    torchrun = sys.executable, "-m", "torch.distributed.run", "--nnodes", len(net.hosts)
    rendezvous = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{net.hosts[0]}:29500"
    return *torchrun, "--nproc-per-node", 1, *rendezvous


class Seen(NamedTuple):
    """Losses and times of the results, the weights, the plans, and all that was printed."""

    losses: list[float]
    ends_s: list[float]
    weights: dict[str, torch.Tensor]
    plans: list[hp.Plan]
    text: str


def _seen(run: Run) -> Seen:
    """Wait for the end of the results."""
    text = ""

    def is_done() -> bool:
        nonlocal text
        text = run.words(H0)
        return run.training[H0].poll() is not None or "\ndone\n" in text

    eventually(is_done, LIMIT_S)
    rows = re.findall(r"^result (\d+) (\S+) (\S+)$", text, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [*range(16)], text[-3000:]
    loaded = torch.load(run.folder / "weights.pt")
    plans = [read_plan(file)[0] for file in sorted(run.folder.glob("plan-*.json"))]
    losses, ends_s = ([float(row[n]) for row in rows] for n in (2, 1))
    return Seen(losses, ends_s, loaded, plans, text)


def _survive(chosen: argparse.Namespace, event: Event, whole: Seen) -> tuple[str, list[str]]:
    """Return the seconds of the recovery by phase, and what is wrong."""
    with _running(chosen, event.way) as run:
        reached = f"result {BREAK_AT} "
        assert eventually(lambda: reached in run.words(H0), LIMIT_S), run.words(H0)[-3000:]
        begin_s = time.monotonic()
        event.happen(run)
        seen = _seen(run)
        problems = []
        lost = re.findall(r"^lost (\S+) (\d+) (.*)$", seen.text, re.MULTILINE)
        if {members for members, *_ in lost} != ({event.members} if event.members else set()):
            problems.append(f"lost {lost}")
        expected = losses = whole.losses
        weights = whole.weights
        if not whole.plans[0].rule.flushes:
            expected, _ = _continued(chosen, seen.plans[:1], [])  # `whole` may have another plan
            losses, weights = _continued(chosen, seen.plans, [int(begin) for _, begin, _ in lost])
        # A result may have been given before a loss, with the first plan.
        errors = [
            min(abs(loss - other) / abs(other) for other in others)
            for loss, *others in zip(seen.losses, expected, losses, strict=True)
        ]
        worst = max(
            float((seen.weights[name] - value).abs().max()) for name, value in weights.items()
        )
        words = (
            f"{_phases(seen, begin_s)}, losses differ by {max(errors):.1e}, weights by {worst:.1e}"
        )
        if max(*errors, worst) > NEAR:
            problems.append("too far")
        return words, problems


def _continued(
    chosen: argparse.Namespace, plans: Sequence[hp.Plan], begins: Sequence[int]
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of a training on this host that changes to the next plan before
    each of the mini-batches `begins`."""
    torch.manual_seed(0)
    work = load_workload(chosen.model)
    batches = list(itertools.islice(work.batches(chosen.samples, 0), 16))
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (plan, end) in enumerate(zip(plans, (*begins, 16), strict=True)):
            names = dict.fromkeys([*plan.all_devices, "spare"])
            members = tuple(Member(name, DEVICE) for name in names)
            with hp.Pipeline(
                work.model, work.loss_fn, batches[0], plan=plan, survive="auto", snapshot_every=4,
                cluster=hp.Cluster(members, transport="shared-memory"),
                optimizer=work.optimizer or hp.optim.sgd(lr=0.01),
            ) as pipe:  # fmt: skip
                if number:
                    pipe.restore(folder)
                losses += [result.loss for result in pipe.run(batches[len(losses) : end])]
                pipe.save(folder, force=True)
                weights = pipe.state_dict()
    return losses, weights


def _phases(seen: Seen, begin_s: float) -> str:
    found = re.findall(r"^phase (\S+) (\S+) (\S+)$", seen.text, re.MULTILINE)
    spans = [(name, float(start), float(end)) for name, start, end in found]
    noticed_s = min((start for name, start, _ in spans if name == "close"), default=None)
    if noticed_s is None:
        return "no loss"
    replayed_s = max(end for name, _, end in spans if name == "replay")
    next_s = min(end_s for end_s in seen.ends_s if end_s > replayed_s)
    spans_s = dict.fromkeys(PHASES, 0.0)
    for name, start, end in spans:
        if noticed_s <= start < replayed_s:
            spans_s[name] += end - start
    parts = ", ".join(f"{name} {took_s:.1f}" for name, took_s in spans_s.items())
    return f"found {noticed_s - begin_s:.1f}, next result {next_s - noticed_s:.1f} later ({parts})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT")
    parser.add_argument("--model", default="digits")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--samples", type=int, default=32, help="in a mini-batch")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--options", default="{}", help="JSON")
    parser.add_argument("--transport", default="tcp")
    chosen = parser.parse_args()
    with _running(chosen, "meet") as run:
        whole = _seen(run)
    wrong = 0
    for name in chosen.events or EVENTS:
        words, problems = _survive(chosen, EVENTS[name], whole)
        wrong += bool(problems)
        print(f"{name:16} {words} {'; '.join(problems)}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
