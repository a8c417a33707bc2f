"""Failures: too little memory, an index out of range, and a killed worker."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import hetpipe as hp
from card.setting import HOST, Setting, Wrong, error_of
from hetpipe import process
from hetpipe.cluster.cluster import Cluster
from hetpipe.crew.crew import Crew
from hetpipe.sdk.backend import Device
from hetpipe.sdk.graph import canonical
from hetpipe.sdk.host.registry import decompositions_of, open_device

LEFT_NBYTES, ASKED_NBYTES = 1 << 30, 3 << 30
WAIT_S = 20.0
KILL_LIMIT_S = 15.0
"""Longest time from a worker's death to the controller's error, and to the release of memory."""
CLASSES, WIDTH = 10, 64


def index(setting: Setting) -> None:
    """Give a class number and a computed index that are out of range.

    The controller must refuse the first before a device sees it, and train on. At the second the
    device must report an error. Some cards work only in a new process afterwards.
    """
    torch.manual_seed(0)
    x, y = torch.randn(8, WIDTH), torch.randint(CLASSES, (8,))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    with hp.Pipeline(
        model, nn.functional.cross_entropy, (x, y), cluster=Cluster.local(devices=[setting.device]),
        optimizer=hp.optim.sgd(lr=0.1), microbatches=2, schedule="1f1b", cuts=(),
    ) as pipe:  # fmt: skip
        before = pipe.evaluate([(x, y)]).loss
        refused = error_of(lambda: pipe.step(x, y + CLASSES), "class numbers out of range")
        setting.keep(refused=refused)
        if pipe.evaluate([(x, y)]).loss != before:
            raise Wrong("the refused mini-batch has changed the model")
        pipe.step(x, y)
    device = open_device(setting.device)
    rows, numbers = np.ones((CLASSES, WIDTH), np.float32), np.array([1, CLASSES - 1])
    reported = error_of(lambda: _run(device, _looked_up, rows, numbers), "index out of range")
    setting.keep(reported=reported, afterwards=_afterwards(device))
    check = [*process.command("card.failures", setting.device)]
    if subprocess.run(check, env=process.environment()).returncode:
        raise Wrong("the device does not work in a new process")


def memory(setting: Setting) -> None:
    """Upload more than the device has left, and run a graph that needs more; then compute."""
    device = open_device(setting.device)
    small = np.ones((WIDTH, WIDTH), np.float32)
    large = np.zeros(ASKED_NBYTES // 4, np.float32)
    _run(device, _square, small)
    found = {}
    with _little_memory(setting):
        found["upload"] = error_of(lambda: _upload(device, large), "a large upload")
        found["pass"] = error_of(lambda: _run(device, _spread, small), "a large pass")
        setting.keep(errors=found)
        _run(device, _square, small)
    _upload(device, large[: 1 << 20])
    for what, text in found.items():
        numbers = set(re.findall(r"\d[\d.]* ?(?:bytes|[KMGT]i?B)", text))
        if len(numbers) < (2 if setting.is_card else 1):  # torch's message for CPUs has one
            raise Wrong(f"a large {what}: the message lacks the bytes asked for or left: {text}")


def kill(setting: Setting) -> None:
    """Kill the card's worker in mid-step: the controller must report it, and memory be freed."""
    torch.manual_seed(0)
    x, y = torch.randn(256, WIDTH), torch.randint(CLASSES, (256,))
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(40)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    cluster = Cluster.local(devices=[HOST, setting.device])
    free = _free_nbytes(setting)
    with Crew.start(cluster) as crew, hp.Pipeline(
        model, nn.functional.cross_entropy, (x, y), cluster=cluster, crew=crew,
        optimizer=hp.optim.sgd(lr=0.01), microbatches=32, schedule="1f1b", cuts=(20,),
    ) as pipe:  # fmt: skip
        pipe.step(x, y)
        member = pipe.plan.all_devices[-1]
        workers = crew.call([*cluster.ids], "card.failures:process_of")
        victim = workers[list(cluster.ids).index(member)]
        killed_s: list[float] = []

        def end() -> None:
            killed_s.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)

        threading.Timer(0.5, end).start()

        def train() -> None:
            while not killed_s or time.monotonic() < killed_s[0] + KILL_LIMIT_S:
                pipe.step(x, y)

        text = error_of(train, f"worker {member} killed")
        report_s = time.monotonic() - killed_s[0]
        setting.keep(error=text, report_s=report_s)
    if report_s > KILL_LIMIT_S:
        raise Wrong(f"the controller reported the death after {report_s:.1f} s")
    if not _eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers)):
        raise Wrong("a worker's process has not ended")
    if free is not None:
        # Other processes may use the card too, so a little less may be free than before.
        freed = _eventually(lambda: (_free_nbytes(setting) or 0) > 0.98 * free)
        setting.keep(free_before_nbytes=free, free_after_nbytes=_free_nbytes(setting))
        if not freed:
            raise Wrong("the killed worker's memory on the card has not been freed")


def process_of(device: Any) -> int:
    """Return the id of the worker's process; called in a worker."""
    return os.getpid()


def _square(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.mm(x, x),)


def _spread(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a result of `ASKED_NBYTES`."""
    copies = ASKED_NBYTES // x.numel() // 4
    return (x.reshape(1, -1).expand(copies, -1) * 2.0,)


def _looked_up(rows: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (nn.functional.embedding(numbers * 2, rows),)


def _run(device: Device, function: Callable[..., Any], *arrays: Any) -> None:
    """Trace a function, run it on the device, and wait for its first result."""
    table = dict(decompositions_of(device.info.backend))
    traced = make_fx(function, decomposition_table=table, tracing_mode="fake")
    executable = device.compile(canonical(traced(*map(torch.from_numpy, arrays))))
    outputs, event, _ = executable.run([_upload(device, array) for array in arrays])
    event.wait(WAIT_S)
    if outputs[0].nbytes < LEFT_NBYTES:
        host = np.empty(outputs[0].shape, np.float32)
        device.download(outputs[0], host).wait(WAIT_S)
        if not np.isfinite(host).all():
            raise Wrong(f"{function.__name__}: the result is not finite")


def _upload(device: Device, array: Any) -> Any:
    buffer, event = device.upload(array)
    event.wait(WAIT_S)
    return buffer


def _afterwards(device: Device) -> str:
    """Return whether a device works, in words."""
    try:
        _run(device, _square, np.ones((WIDTH, WIDTH), np.float32))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "works"


@contextmanager
def _little_memory(setting: Setting) -> Iterator[None]:
    """Leave about `LEFT_NBYTES` of the device's memory to this process."""
    if setting.is_card:
        free = _free_nbytes(setting)
        assert free is not None
        filled = torch.empty(
            max(free - LEFT_NBYTES, 0), dtype=torch.uint8, device=setting.torch_name
        )
        try:
            yield
        finally:
            del filled
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + LEFT_NBYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _free_nbytes(setting: Setting) -> int | None:
    """Return the free bytes of a card; None for a CPU."""
    if not setting.is_card:
        return None
    module = torch.get_device_module(setting.kind)
    free, _ = module.mem_get_info(torch.device(setting.torch_name))
    return int(free)


def _eventually(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + KILL_LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    sys.exit(_afterwards(open_device(sys.argv[1])) != "works")
