"""Break a training over two hosts in many ways, each at random moments, and print how it ended.

    python tests/engine/break_hosts.py [--moments 20] [--seed 0] [EVENT ...]

The hosts h0 (controller) and h1 (agent) are network namespaces, so this needs root. A training must
end in time, name the lost host, leave no process, and leave a whole checkpoint or none.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from crews import eventually  # noqa: E402
from networks import Network, network  # noqa: E402

SECRET = {"HETPIPE_SECRET": "a secret of the tests alone", "PYTHONUNBUFFERED": "1"}
QUICK_S, SILENT_S = 5.0, 8.0
MEET_S = 25.0
"""The limit while the hosts still look for each other, for 20 s."""
LATEST_S = 60.0
"""Seconds after which a training that has not ended is killed."""
TRAIN = """
import sys, time
import torch
from torch import nn
import hetpipe as hp

folder, address = sys.argv[1:]
print("meet")
cluster = hp.Cluster.hosts(
    address, 2, name="h0", limit_s=20, devices=["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
)
torch.manual_seed(0)
print("start")
model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))
x, y = torch.randn(64, 64), torch.randint(4, (64,))
options = {"optimizer": hp.optim.adamw(), "cuts": [1], "microbatches": 4}
if int(folder[-1]) % 2:
    del options["cuts"]
try:
    loss_fn = nn.functional.cross_entropy
    with hp.Pipeline(model, loss_fn, (x, y), cluster=cluster, **options) as pipe:
        print("step")
        for result in pipe.run((x, y) for _ in range(10_000_000)):
            if result.index % 20 == 0:
                pipe.save(folder)
except hp.HetpipeError as error:
    print("ended", time.monotonic(), error)
    sys.exit(1)
"""

Training = dict[str, subprocess.Popen[str]]


def _processes(net: Network, host: str) -> list[int]:
    names = subprocess.run(
        ["ip", "netns", "pids", net.namespace(host)], capture_output=True, text=True, check=True
    )
    return [int(name) for name in names.stdout.split()]


def _workers(net: Network, host: str) -> list[int]:
    """Return the processes that are no agent and no controller; the newest is a worker."""
    found = []
    for process in _processes(net, host):
        with suppress(OSError):
            if "forkserver" in Path(f"/proc/{process}/cmdline").read_text():
                found.append(process)
    return found


def _signal(number: int, host: str, kind: str) -> Callable[[Network, Training], None]:
    def send(net: Network, training: Training) -> None:
        if kind == "worker":
            eventually(lambda: bool(_workers(net, host)), LATEST_S)
        chosen = [training[host].pid] if kind == "main" else _workers(net, host)[-1:]
        for process in chosen:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    return send


def _cut(net: Network, training: Training) -> None:
    subprocess.run(["ip", "-n", net.namespace("h1"), "link", "set", "eth0", "down"], check=True)


def _switch_off(net: Network, training: Training) -> None:
    _cut(net, training)
    net.kill("h1")


H0, H1 = "h0", "h1"
EVENTS: dict[str, tuple[float, str, Callable[[Network, Training], None]]] = {
    "kill-worker": (QUICK_S, H0, _signal(signal.SIGKILL, H1, "worker")),
    "kill-agent": (QUICK_S, H0, _signal(signal.SIGKILL, H1, "main")),
    "kill-controller": (QUICK_S, H1, _signal(signal.SIGKILL, H0, "main")),
    "ctrl-c-agent": (QUICK_S, H0, _signal(signal.SIGINT, H1, "main")),
    "ctrl-c-controller": (QUICK_S, H1, _signal(signal.SIGINT, H0, "main")),
    "stop-worker": (SILENT_S, H0, _signal(signal.SIGSTOP, H1, "worker")),
    "stop-agent": (SILENT_S, H0, _signal(signal.SIGSTOP, H1, "main")),
    "stop-controller": (SILENT_S, H1, _signal(signal.SIGSTOP, H0, "main")),
    "cut": (SILENT_S, H0, _cut),
    "switch-off": (SILENT_S, H0, _switch_off),
}
"""By name: the limit from the event to the end, the host whose end counts, and the event."""


def _run(event: str, moment_s: float, number: int) -> tuple[str, float, str]:
    """Return the phase, the seconds from the event to the end, and what is wrong, or ""."""
    limit_s, host, happen = EVENTS[event]
    with tempfile.TemporaryDirectory() as folder, network(2, Path(folder)) as net:
        checkpoint, words = Path(folder, f"checkpoint{number}"), Path(folder, "words")
        address = f"{net.address(H0)}:29400"
        with words.open("w") as file, words.with_name("other").open("w") as other:
            training: Training = {
                H0: _start(net, H0, file, sys.executable, "-c", TRAIN, checkpoint, address),
                H1: _start(net, H1, other, sys.executable, "-m", "hetpipe", "agent", "--meet",
                           address, "--name", H1, "--limit", 20),
            }  # fmt: skip
            eventually(lambda: "meet" in words.read_text(), LATEST_S)
            time.sleep(moment_s)
            lines = words.read_text().splitlines()
            phase = [line for line in lines if line in ("meet", "start", "step")][-1:]
            with suppress(subprocess.CalledProcessError):
                happen(net, training)
            begin_s = time.monotonic()
            with suppress(subprocess.TimeoutExpired):
                training[host].wait(LATEST_S)
            took_s = _end_s(words, host) - begin_s
            problems = _problems(net, training, host, words, event)
            if took_s > (limit_s if phase != ["meet"] else MEET_S):
                problems.append(f"took {took_s:.1f} s")
            if checkpoint.exists():
                from hetpipe.checkpoint.checkpoint import load

                try:
                    load(checkpoint)
                except Exception as error:
                    problems.append(f"checkpoint: {error}")
    return (phase or ["import"])[0], took_s, "; ".join(problems)


def _start(net: Network, host: str, file: object, *command: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        net.command(host, *command), env={**os.environ, **SECRET}, stdin=subprocess.DEVNULL,
        stdout=file, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _end_s(words: Path, host: str) -> float:
    """Return when the controller's script has got the error, or else the present time."""
    found = [line.split()[1] for line in words.read_text().splitlines() if line.startswith("ended")]
    return float(found[0]) if found and host == H0 else time.monotonic()


def _problems(net: Network, training: Training, host: str, words: Path, event: str) -> list[str]:
    problems = []
    if training[host].returncode in (None, 0):
        problems.append(f"{host} ended with {training[host].returncode}")
    text = (words if host == H0 else words.with_name("other")).read_text()
    name = H1 if host == H0 else H0
    if name not in text:
        problems.append(f"{name} is not named: {text[-300:]!r}")
    stopped = [p.pid for p in training.values()] if event.startswith("stop") else []
    for process in stopped:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
    if not eventually(lambda: not (_processes(net, H0) + _processes(net, H1)), 10.0):
        problems.append(f"left: {_processes(net, H0)} {_processes(net, H1)}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("events", nargs="*", default=[*EVENTS], choices=[*EVENTS])
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--longest-s", type=float, default=12.0, help="the latest moment")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(chosen.seed)
    failures = 0
    for event in chosen.events:
        ends = []
        for number in range(chosen.moments):
            moment_s = chance.uniform(0.0, chosen.longest_s)
            phase, took_s, problem = _run(event, moment_s, number)
            ends.append(took_s)
            failures += bool(problem)
            print(f"{event} at {moment_s:.1f} s ({phase}): {took_s:.1f} s {problem}", flush=True)
        print(f"{event}: {len(ends)} moments, latest end after {max(ends):.1f} s", flush=True)
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
