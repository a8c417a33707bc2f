"""Break a training over two hosts in many ways, each at random moments, and print how it ended.

    python tests/engine/break_hosts.py [--moments 20] [--seed 0] [EVENT ...]

The hosts h0 (controller) and h1 (agent) are network namespaces, so this needs root. A training must
end in time, name the lost host, leave no process, and leave a whole checkpoint or none. An intruder
must be refused in time, and the training must go on, as it must if the agent's disks are full, if
other processes load the machine, and if all processes are stopped for a while and continue.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from crews import eventually  # noqa: E402
from networks import Network, network  # noqa: E402

from hetpipe import __version__  # noqa: E402
from hetpipe.caches import cache_folder  # noqa: E402

SECRET = {"HETPIPE_SECRET": "a secret of the tests alone", "PYTHONUNBUFFERED": "1"}
OTHER_SECRET = {**SECRET, "HETPIPE_SECRET": "another secret of the tests"}
H0, H1 = "h0", "h1"
QUICK_S, STOPPED_S, SILENT_S = 5.0, 2.0, 5.0
LATEST_S = 60.0
"""Seconds after which a training that has not ended is killed."""
CONTINUED_S = 40.0
"""Seconds in which a process ends that was stopped while it imported torch, and continues."""
LOAD_S, SUSPENDED_S = 60.0, 20.0
"""Seconds of a load beside the training, and of a pause of all processes."""
STEPS_S = 2.0
"""Seconds that the training takes for one turn of steps, evaluations and saves, and more."""
SMALL_NBYTES = 4 << 20
"""Bytes of the disk with the checkpoints."""
TRAIN = """
import itertools, os, sys, time
import torch
from torch import nn
import hetpipe as hp

folder, way, phases, number = sys.argv[1:]
file = os.open(phases, os.O_WRONLY | os.O_CREAT)
enter = lambda phase: os.pwrite(file, phase.ljust(10).encode(), 0)
where = {"agents": [way]} if way.endswith(":29401") else {"meet": way, "count": 2}
devices = ["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
try:
    enter("meet")
    print("calls", time.monotonic())
    cluster = hp.Cluster.hosts(**where, name="h0", limit_s=20, devices=devices)
    torch.manual_seed(0)
    enter("start")
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
    x, y = torch.randn(64, 64), torch.randint(4, (64,))
    options = {"optimizer": hp.optim.adamw(), "microbatches": 4}
    if int(number) % 3:
        options["cuts"] = [1]  # otherwise it measures
    loss_fn = nn.functional.cross_entropy
    with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, **options) as pipe:
        for turn in itertools.count():
            enter("step")
            for result in pipe.run((x, y) for _ in range(50)):
                pass
            enter("pause")
            time.sleep(0.2)
            enter("evaluate")
            pipe.evaluate([(x, y)] * 50)
            enter("save")
            for _ in range(5):
                pipe.save(folder)
except (hp.HetpipeError, OSError) as error:
    print(f"{type(error).__name__}: {error}")
    sys.exit(1)
"""
GUEST = """
import dataclasses, sys, time
from hetpipe.crew import agent
from hetpipe.hosts.facts import own_facts
from hetpipe.hosts.meeting import parse_address

address, version = sys.argv[1:]
facts = dataclasses.replace(own_facts("h2"), hetpipe=version)
agent.own_facts = lambda name: facts
print("calls", time.monotonic())
agent.serve_once(parse_address(address), "h2", 20.0)
"""

Training = dict[str, subprocess.Popen[str]]


class Run(NamedTuple):
    """A training that runs, and the files that it writes."""

    net: Network
    training: Training
    folder: Path
    way: str  # the address where the hosts meet

    def start(
        self, host: str, words: str, *command: object, environment: dict[str, str] = SECRET
    ) -> subprocess.Popen[str]:
        """Start a command on a host; what it prints goes to the file `words`."""
        with (self.folder / words).open("w") as file:
            return subprocess.Popen(
                self.net.command(host, *command), env={**os.environ, **environment},
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

    def start_controller(self, number: int, words: str = H0) -> subprocess.Popen[str]:
        checkpoint, phase = self.folder / "disk" / "checkpoint", self.folder / f"{words}.phase"
        script = sys.executable, "-c", TRAIN
        return self.start(H0, words, *script, checkpoint, self.way, phase, number)

    def words(self, name: str) -> str:
        """Return what a command has printed."""
        return (self.folder / name).read_text()

    @property
    def phase(self) -> str:
        with suppress(OSError):
            return (self.folder / f"{H0}.phase").read_text().strip() or "import"
        return "import"

    def processes(self, host: str) -> list[int]:
        found = ["ip", "netns", "pids", self.net.namespace(host)]
        names = subprocess.run(found, capture_output=True, text=True, check=True)
        return [int(name) for name in names.stdout.split()]

    def workers(self, host: str) -> list[int]:
        """Return the fork servers of a host, then their workers."""
        found = [each for each in self.processes(host) if "forkserver" in _command(each)]
        return sorted(found, key=lambda process: _parent(process) in found)


def _command(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_text()
    return ""


def _parent(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def send_signal(number: int, host: str, kind: str) -> Callable[[Run], None]:
    def send(run: Run) -> None:
        if kind == "worker":
            eventually(lambda: bool(run.workers(host)), LATEST_S)
        chosen = [run.training[host].pid] if kind == "main" else run.workers(host)[-1:]
        for process in chosen:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    return send


def _cut(run: Run) -> None:
    subprocess.run(["ip", "-n", run.net.namespace(H1), "link", "set", "eth0", "down"], check=True)


def _switch_off(run: Run) -> None:
    _cut(run)
    run.net.kill(H1)


def _fill_disk(run: Run) -> None:
    with suppress(OSError), (run.folder / "disk" / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _full_after_meeting(run: Run) -> None:
    """Fill the disk; the event is the next save."""
    _fill_disk(run)
    eventually(lambda: run.phase == "save", LATEST_S)


def fill_disks_of_agent(run: Run) -> None:
    """Put full disks in the place of the folders to which an agent and its workers may write."""
    for folder in (cache_folder("costs").parent, *map(Path, ("/tmp", "/var/tmp", "/dev/shm"))):
        inside = "nsenter", "--mount", "--target", str(run.training[H1].pid)
        fill = 'mount -t tmpfs -o size=4k full "$0" && head -c 4096 /dev/zero > "$0/full"'
        subprocess.run([*inside, "sh", "-c", fill, str(folder)], check=True)


def _load_machine(run: Run) -> None:
    """Let other processes compute on all cores."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    eventually(lambda: _has_ended(run), LOAD_S)
    for other in others:
        other.kill()
        other.wait()


def _suspend(run: Run) -> None:
    """Stop all processes of both hosts for a while, as in a laptop that sleeps."""
    processes = [*run.processes(H0), *run.processes(H1)]
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)
        if number == signal.SIGSTOP:
            time.sleep(SUSPENDED_S)


class Event(NamedTuple):
    """Ends a training. `host` is the one whose end counts, `names` what it must name."""

    limit_s: float
    host: str
    happen: Callable[[Run], None]
    names: str


def _ends_h0(limit_s: float, happen: Callable[[Run], None]) -> Event:
    return Event(limit_s, H0, happen, H1)


def _ends_h1(limit_s: float, happen: Callable[[Run], None]) -> Event:
    return Event(limit_s, H1, happen, H0)


class Strain(NamedTuple):
    """Must not end a training."""

    happen: Callable[[Run], None]


class Intruder(NamedTuple):
    """Calls while a training runs. `reason` is what it must be told."""

    start: Callable[[Run], subprocess.Popen[str]]
    reason: str
    stays: bool = False  # whether the agent of the training is one that stays


def _agent(version: str, environment: dict[str, str]) -> Callable[[Run], subprocess.Popen[str]]:
    return lambda run: run.start(
        H1, "guest", sys.executable, "-c", GUEST, run.way, version, environment=environment
    )


EVENTS: dict[str, Event | Strain | Intruder] = {
    "kill-worker": _ends_h0(QUICK_S, send_signal(signal.SIGKILL, H1, "worker")),
    "kill-agent": _ends_h0(QUICK_S, send_signal(signal.SIGKILL, H1, "main")),
    "kill-controller": _ends_h1(QUICK_S, send_signal(signal.SIGKILL, H0, "main")),
    "ctrl-c-agent": _ends_h0(QUICK_S, send_signal(signal.SIGINT, H1, "main")),
    "ctrl-c-controller": _ends_h1(QUICK_S, send_signal(signal.SIGINT, H0, "main")),
    "stop-worker": _ends_h0(STOPPED_S, send_signal(signal.SIGSTOP, H1, "worker")),
    "stop-agent": _ends_h0(STOPPED_S, send_signal(signal.SIGSTOP, H1, "main")),
    "stop-controller": _ends_h1(STOPPED_S, send_signal(signal.SIGSTOP, H0, "main")),
    "cut": _ends_h0(SILENT_S, _cut),
    "switch-off": _ends_h0(SILENT_S, _switch_off),
    "full-disk": Event(QUICK_S, H0, _full_after_meeting, "No space left"),
    "full-agent": Strain(fill_disks_of_agent),
    "load": Strain(_load_machine),
    "suspend": Strain(_suspend),
    "wrong-secret": Intruder(_agent(__version__, OTHER_SECRET), "another secret"),
    "other-version": Intruder(_agent("0.0.1", SECRET), "install one version"),
    "too-many": Intruder(_agent(__version__, SECRET), "all 2 hosts have met"),
    "busy": Intruder(
        lambda run: run.start_controller(0, "guest"),
        "h1 refuses: this agent works for host 'h0'",
        True,
    ),
}


@contextmanager
def _running(number: int, *, stays: bool) -> Iterator[Run]:
    """Yield a training; at every second number it has started. Its checkpoints go to a small
    disk."""
    with tempfile.TemporaryDirectory() as name, network(2, Path(name)) as net:
        folder = Path(name)
        disk = folder / "disk"
        disk.mkdir()
        size = f"size={SMALL_NBYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", disk], check=True)
        try:
            way = f"{net.address(H1)}:29401" if stays else f"{net.address(H0)}:29400"
            run = Run(net, {}, folder, way)
            run.training[H0] = run.start_controller(number)
            how = ("--stay", "--listen", way) if stays else ("--meet", way, "--limit", 20)
            command = sys.executable, "-m", "hetpipe", "agent", *how, "--name", H1
            run.training[H1] = run.start(H1, H1, *command)
            before = ("import", "meet") if number % 2 else ("import", "meet", "start")
            eventually(lambda: run.phase not in before, LATEST_S)
            yield run
        finally:
            for host in net.hosts:
                net.kill(host)
            subprocess.run(["umount", "--lazy", disk], check=True)


def _break(event: Event, moment_s: float, number: int) -> tuple[str, float, list[str]]:
    """Return the phase, the seconds from the event to the end, and what is wrong."""
    with _running(number, stays=False) as run:
        time.sleep(moment_s)
        phase = run.phase
        with suppress(subprocess.CalledProcessError):
            event.happen(run)
        begin_s = time.monotonic()
        ends = run.training[event.host]
        eventually(
            lambda: event.names in run.words(event.host) or ends.poll() is not None, LATEST_S
        )
        took_s = time.monotonic() - begin_s
        with suppress(subprocess.TimeoutExpired):
            ends.wait(LATEST_S)
        problems = _problems(run, event)
        if took_s > event.limit_s:
            problems.append(f"took {took_s:.1f} s")
        return phase, took_s, problems


def _problems(run: Run, event: Event) -> list[str]:
    problems = []
    status, text = run.training[event.host].returncode, run.words(event.host)
    if status in (None, 0):
        problems.append(f"{event.host} ended with {status}")
    if event.names not in text:
        problems.append(f"{event.names!r} is not named: {text[-300:]!r}")
    stopped = {each.pid for each in run.training.values() if each.poll() is None}

    def left() -> list[int]:
        return [*{*run.processes(H0), *run.processes(H1)} - stopped]

    def beside() -> list[str]:
        """Return what is left beside stopped processes and their guards."""
        return [text for text in map(_command, left()) if text and "hosts.guard" not in text]

    if not eventually(lambda: not beside(), QUICK_S):
        problems.append(f"left beside stopped ones: {beside()}")
    for process in stopped:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    stopped.clear()
    if not eventually(lambda: not left(), CONTINUED_S):
        problems.append(f"left: {[*map(_command, left())]}")
    return problems + _problems_of_checkpoint(run)


def _problems_of_checkpoint(run: Run) -> list[str]:
    from hetpipe.checkpoint.series import load

    checkpoint = run.folder / "disk" / "checkpoint"
    try:
        if (checkpoint / "manifest.json").exists():  # the first save may have been broken off
            load(checkpoint)
    except Exception as error:
        return [f"checkpoint: {error}"]
    return []


def _intrude(intruder: Intruder, moment_s: float, number: int) -> tuple[str, float, list[str]]:
    """Return the phase, the seconds until an intruder is refused, and what is wrong."""
    with _running(number, stays=intruder.stays) as run:
        time.sleep(moment_s)
        phase = run.phase
        guest = intruder.start(run)
        with suppress(subprocess.TimeoutExpired):
            guest.wait(LATEST_S)
        problems, text = [], run.words("guest")
        called = re.search(r"^calls (\S+)", text, re.MULTILINE)
        took_s = time.monotonic() - float(called[1] if called else 0.0)
        if guest.returncode in (None, 0) or intruder.reason not in text:
            problems.append(f"{guest.returncode}, {text[-300:]!r}")
        if took_s > QUICK_S:
            problems.append(f"took {took_s:.1f} s")
        return phase, took_s, problems + _problems_of_going_on(run)


def _strain(strain: Strain, moment_s: float, number: int) -> tuple[str, float, list[str]]:
    """Return the phase, the seconds until the training has saved again, and what is wrong."""
    with _running(number, stays=False) as run:
        time.sleep(moment_s)
        phase = run.phase
        strain.happen(run)
        begin_s = time.monotonic()
        problems = _problems_of_going_on(run)
        return phase, time.monotonic() - begin_s, problems


def _problems_of_going_on(run: Run) -> list[str]:
    """Return why a training does not go on."""
    seen = {run.phase}
    eventually(lambda: (seen.add(run.phase), {"step", "save"} <= seen)[1], LATEST_S)
    if _has_ended(run):
        return [f"the training has ended: {run.words(H0)} {run.words(H1)}"]
    if not {"step", "save"} <= seen:
        return [f"the training does not go on: {seen}"]
    return []


def _has_ended(run: Run) -> bool:
    return any(each.poll() is not None for each in run.training.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", nargs="*", metavar="EVENT")
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--longest-s", type=float, default=8.0, help="the latest moment")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    failures, rows = 0, []
    for name in chosen.events or EVENTS:
        chance = random.Random(f"{chosen.seed} {name}")
        event, ends, wrong = EVENTS[name], [], 0
        for number in range(chosen.moments):
            moment_s = chance.uniform(0.0, chosen.longest_s if number % 2 else STEPS_S)
            if isinstance(event, Event):
                phase, took_s, problems = _break(event, moment_s, number)
            elif isinstance(event, Strain):
                phase, took_s, problems = _strain(event, moment_s, number)
            else:
                phase, took_s, problems = _intrude(event, moment_s, number)
            ends.append(took_s)
            wrong += bool(problems)
            words = "; ".join(problems)
            print(f"{name} at {moment_s:.1f} s ({phase}): {took_s:.1f} s {words}", flush=True)
        figures = min(ends), statistics.median(ends), max(ends)
        rows.append(
            f"{name:20} {len(ends):4} {wrong:6} {'{:7.1f} {:7.1f} {:7.1f}'.format(*figures)}"
        )
        print(rows[-1], flush=True)
        failures += wrong
    print(f"{'event':20} runs  wrong   least  median  latest", *rows, sep="\n")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
