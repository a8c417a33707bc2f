"""A training whose devices fail and are repaired at random: see `benchmarks.survived`.

Four paced devices (`benchmarks.paced`) train perceptrons in float64, where rounding does not grow
to a visible size, with SGD with momentum and dropout. A loss takes one device or, at times, two.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import nn

import hetpipe as hp
from benchmarks.paced import Pace, PacedBackend, PacedDevice
from benchmarks.survivalcost import DEVICE, costs_of, pinned
from benchmarks.survivalrecovery import pid_of
from hetpipe.cluster.cluster import Cluster
from hetpipe.errors import BackendError, HetpipeError
from hetpipe.plan.survival import best_updates
from hetpipe.sdk.backend import Device
from hetpipe.sdk.host.registry import get_backend, register_backend
from hetpipe.sdk.info import DeviceInfo
from hetpipe.study.outage import Event, Failures, Lost, Policy, Run
from hetpipe.train.training import one_thread

MEMBERS = 4
DOUBLE = 0.3
"""The chance that a loss takes two devices."""
FOLDER = "SURVIVED_FOLDER"
"""The variable with the folder where a file stands for each device that is lost."""
PACE = Pace(2.5e8, 2.5e9)
WIDTH, DEPTH, SAMPLES = 256, 12, 64
LOOK_S = 0.1
SAVES = 5
OPTIMIZER = hp.optim.sgd(lr=0.01, momentum=0.9)
BAR = 1e-6


class FailingTorch(PacedBackend):
    """Paced devices that cannot be opened while their file exists."""

    name, of = "failing-pytorch", "pytorch"

    def discover(self) -> list[DeviceInfo]:
        (info,) = (each for each in super().discover() if each.id.endswith(f":even:{DEVICE}"))
        return [replace(info, id=f"{self.name}:{n}:{DEVICE}") for n in range(MEMBERS)]

    def open(self, info: DeviceInfo) -> Device:
        number, device = info.id.split(":", 2)[1:]
        if mark_of(int(number)).exists():
            raise BackendError(f"device {number} is lost, and not yet repaired")
        inner = get_backend(self.of)
        (found,) = (each for each in inner.discover() if each.id == device)
        return PacedDevice(info, inner.open(found), PACE)


def mark_of(number: int) -> Path:
    """Return the file that exists while a device is lost."""
    return Path(os.environ[FOLDER]) / f"lost{number}"


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the same mini-batches for ever."""
    for number in count():
        draw = torch.Generator().manual_seed(number)
        x = torch.randn(SAMPLES, WIDTH, generator=draw, dtype=torch.float64)
        yield x, torch.randint(10, (SAMPLES,), generator=draw)


def make_model() -> nn.Module:
    """Return the perceptron, always with the same weights."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    return nn.Sequential(*blocks, nn.Dropout(0.1), nn.Linear(WIDTH, 10)).double()


def subject() -> tuple[nn.Module, Any, tuple[torch.Tensor, torch.Tensor]]:
    """Return the model, its loss and an example."""
    return make_model(), nn.functional.cross_entropy, next(batches())


def cluster() -> Cluster:
    """Return the cluster of all devices."""
    return pinned([f"{FailingTorch.name}:{n}:{DEVICE}" for n in range(MEMBERS)])


def opened(**options: Any) -> hp.Pipeline:
    """Open a pipeline on all devices."""
    if "plan" not in options:
        options |= {"schedule": "1f1b", "microbatches": 8}
    return hp.Pipeline(*subject(), cluster=cluster(), optimizer=OPTIMIZER, **options)


@dataclass
class Trained:
    """A training: the moment of each result, how many members there were, and the results."""

    begin_s: float
    times_s: list[float] = field(default_factory=list)
    members: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def wall_s(self) -> float:
        """Seconds until the last result."""
        return self.times_s[-1] - self.begin_s

    @property
    def rate(self) -> float:
        """Mini-batches per second."""
        return len(self.times_s) / self.wall_s

    def rates(self) -> dict[int, float]:
        """Return the median rate by the number of members."""
        steps_s = defaultdict[int, list[float]](list)
        for (before, step), (then_s, now_s) in zip(
            pairwise(self.members), pairwise(self.times_s), strict=True
        ):
            if before == step:
                steps_s[step].append(now_s - then_s)
        return {number: 1 / statistics.median(each) for number, each in steps_s.items()}


def train(pipe: hp.Pipeline, mini_batches: int | None = None, until_s: float = 0.0) -> Trained:
    """Train a number of mini-batches, or until a moment."""
    done = Trained(time.monotonic())
    for number, result in enumerate(pipe.run(islice(batches(), mini_batches))):
        if result.index != number:
            raise HetpipeError(f"result {number} has the index {result.index}")
        done.times_s.append(time.monotonic())
        done.members.append(len(pipe._training.setup.crew.cluster.members))
        done.losses.append(result.loss)
        if mini_batches is None and done.times_s[-1] > until_s:
            break
    done.weights = pipe.state_dict()
    return done


@contextmanager
def failing(pipe: hp.Pipeline, events: Sequence[Event]) -> Iterator[None]:
    """Let devices fail and be repaired within the context, on another thread."""
    stop, begin_s, waiting = threading.Event(), time.monotonic(), list(events)
    failed, killed, ids = np.zeros(MEMBERS, int), set[int](), pipe._training.setup.crew.cluster.ids

    def look() -> None:
        while waiting and waiting[0].time_s < time.monotonic() - begin_s:
            event = waiting.pop(0)
            failed[event.devices] += 1 if event.fail else -1
            names = ", ".join(map(str, event.devices))
            print(f"{event.time_s:.0f} s: {'lost' if event.fail else 'back'} {names}", flush=True)
        crew = pipe._training.setup.crew
        for number, id in enumerate(ids):
            if not failed[number]:
                mark_of(number).unlink(missing_ok=True)
                continue
            mark_of(number).touch()
            pid = pid_of(pipe, id)
            if pid is not None and pid not in killed and not crew._control.failed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    def play() -> None:
        while not stop.wait(LOOK_S):
            look()

    player = threading.Thread(target=play)
    player.start()
    yield
    stop.set()
    player.join()
    for number in range(MEMBERS):
        mark_of(number).unlink(missing_ok=True)


def drawn(failures: Failures, horizon_s: float, seed: int) -> list[Event]:
    """Return a trace. Raises `HetpipeError` if a moment has no device."""
    events, failed = failures.events(horizon_s, seed), np.zeros(MEMBERS, int)
    for event in events:
        failed[event.devices] += 1 if event.fail else -1
        if (failed > 0).all():
            raise HetpipeError(f"seed {seed}: all devices are lost after {event.time_s:.0f} s")
    return events


def main(minutes: float, seed: int, between_s: float, repair_s: float) -> None:
    """Train under a trace and undisturbed, and print what differs."""
    register_backend(FailingTorch)
    pairs = [np.arange(n, n + 2) for n in range(0, MEMBERS, 2)]
    failures = Failures(1 / between_s, repair_s, DOUBLE, pairs)
    events = drawn(failures, 60 * minutes, seed)
    with TemporaryDirectory() as folder, one_thread():
        os.environ[FOLDER] = folder
        with opened(survive="auto") as pipe:
            plan, costs = pipe.plan, costs_of(pipe)
            print(plan, flush=True)
            end_s = time.monotonic() + 60 * minutes
            with failing(pipe, events):
                broken = train(pipe, until_s=end_s)
            losses, joins = pipe.lost, pipe.joined
        out_s = sum(loss.took_s for loss in losses) + sum(join.took_s for join in joins)
        print(f"{len(losses)} losses and {len(joins)} returns, {out_s:.1f} s in all (measured)")
        with opened(plan=plan, costs=costs) as pipe:
            whole = train(pipe, len(broken.times_s))
            saves_s = [saved_s(pipe, folder) for _ in range(SAVES)]
        restarts_s = [restarted_s(folder) for _ in range(2)]
    compare(broken, whole)
    modelled(broken, whole, failures, events, statistics.median(saves_s), restarts_s[-1])


def compare(broken: Trained, whole: Trained) -> None:
    """Print how the results of the two trainings differ, and their rates."""
    error = max(
        float((broken.weights[name] - value).abs().max() / value.abs().max())
        for name, value in whole.weights.items()
    )
    loss = max(
        abs(one - other) / abs(other)
        for one, other in zip(broken.losses, whole.losses, strict=True)
    )
    rates = ", ".join(f"{n}: {rate:.2f}" for n, rate in sorted(broken.rates().items()))
    print(
        f"{len(whole.losses)} mini-batches, each once; float64, SGD with momentum: weights differ "
        f"by {error:.1e} of their size (bar {BAR}), losses by {loss:.1e}\n"
        f"undisturbed {whole.rate:.3f} mini-batches/s; by members, in the trace: {rates} (paced)\n"
        f"goodput {broken.rate:.3f} mini-batches/s, {100 * broken.rate / whole.rate:.1f} % of the "
        f"undisturbed one, over {broken.wall_s:.0f} s (paced devices, measured)",
        flush=True,
    )


def modelled(
    broken: Trained, whole: Trained, failures: Failures, events: Sequence[Event], save_s: float,
    restart_s: float,
) -> None:  # fmt: skip
    """Print the goodput of a training that restarts from checkpoints, in the same trace."""
    rates = broken.rates() | {MEMBERS: whole.rate}
    known = sorted(rates)

    def rate(without: Lost) -> float:
        present = MEMBERS - np.count_nonzero(without)
        return float(np.interp(present, known, [rates[number] for number in known]))

    updates = best_updates(1 / whole.rate, save_s, failures.mtbf_s)
    policy = Policy("restart", rate, updates, save_s, restart_s, restart_s, restart_s, True)
    spent = Run(policy, failures).until(broken.wall_s, events)
    goodput = spent.mini_batches / broken.wall_s
    print(
        f"restarts from checkpoints on the remaining devices, a save every {updates} mini-batches "
        f"(measured: save {1e3 * save_s:.0f} ms, restart {restart_s:.1f} s): goodput "
        f"{goodput:.3f} mini-batches/s, {100 * goodput / whole.rate:.1f} % (modelled)",
        flush=True,
    )


def saved_s(pipe: hp.Pipeline, folder: str) -> float:
    """Return the seconds of a checkpoint."""
    begin_s = time.monotonic()
    pipe.save(Path(folder) / "checkpoint")
    return time.monotonic() - begin_s


def restarted_s(folder: str) -> float:
    """Return the seconds from the start of a process to its first mini-batch from a checkpoint."""
    code = f"import benchmarks.survivaltrace as t; t.restart({folder!r})"
    begin_s = time.monotonic()
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        if "trained" not in process.stdout.readline():
            raise HetpipeError("the process did not restart; its messages are above")
        return time.monotonic() - begin_s


def restart(folder: str) -> None:
    """Train a mini-batch from a checkpoint."""
    register_backend(FailingTorch)
    with one_thread(), hp.Pipeline.load(
        Path(folder) / "checkpoint", *subject(), cluster=cluster(), optimizer=OPTIMIZER,
    ) as pipe:  # fmt: skip
        pipe.step(*next(batches()))
        print("trained", flush=True)
