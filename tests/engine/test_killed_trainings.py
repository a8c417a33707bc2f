"""A script that is killed at random moments, and started again, ends with the weights of an
undisturbed run; its folder has a valid checkpoint at every moment after the first."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from agents import SECRET, end, free_address, start_agent

from hetpipe.checkpoint import load
from hetpipe.checkpoint.series import checkpoints

SCRIPT = """
import sys, time
from itertools import islice
import torch
from torch import nn
import hetpipe as hp

folder, target, count, *agents = sys.argv[1:]
count = int(count)
if agents:
    devices = ["h0/numpy:cpu:0", "h1/numpy:cpu:0"]
    cluster = hp.Cluster.hosts(agents=agents, name="h0", devices=devices, transport="tcp")
else:
    cluster = hp.Cluster.local(devices=["numpy:cpu:0", "numpy:cpu:0"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 8))
x, y = torch.randn(count, 8, 64), torch.randint(8, (count, 8))
with hp.Pipeline(
    model, nn.functional.cross_entropy, (x[0], y[0]), cluster=cluster,
    optimizer=hp.optim.adamw(lr=1e-2), cuts=[1], microbatches=2, schedule="1f1b",
    checkpoint=folder, every=3, keep=2,
) as pipe:
    print("ready", flush=True)
    for result in pipe.run(islice(zip(x, y), pipe.steps, None)):
        time.sleep(0.02)
    torch.save(pipe.state_dict(), target)
"""
KILLS = int(os.environ.get("HETPIPE_TEST_KILLS", "1"))
COUNT = 30 * (KILLS + 1)
"""Mini-batches. A training that is killed within half a second trains fewer than 30."""


@pytest.fixture
def agent() -> Iterator[str]:
    """Yield the address of an agent that stays."""
    address = free_address()
    process = start_agent("--stay", "--listen", address, "--name", "h1")
    try:
        yield address
    finally:
        process.terminate()
        end(process)


def start(path: Path, folder: Path, target: Path, *agents: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, path, folder, target, str(COUNT), *agents],
        env={**os.environ, "HETPIPE_SECRET": SECRET},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def test_killed_trainings_end_with_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_killed_trainings(tmp_path, caplog)


def test_killed_trainings_over_hosts_end_with_the_weights_of_one_host(
    agent: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_killed_trainings(tmp_path, caplog, agent)


def check_killed_trainings(tmp_path: Path, caplog: pytest.LogCaptureFixture, *agents: str) -> None:
    script, folder = tmp_path / "train.py", tmp_path / "run"
    script.write_text(SCRIPT)
    whole = start(script, tmp_path / "whole", tmp_path / "whole.pt")
    choose, steps = random.Random(KILLS), [0]
    for _ in range(KILLS):
        process = start(script, folder, tmp_path / "parts.pt", *agents)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        while not checkpoints(folder) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(choose.uniform(0.0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        saved = load(folder)
        steps.append(saved.manifest["step"])
        assert all(np.isfinite(array).all() for array in saved.tensors["param"].values())
    assert steps == sorted(steps)
    assert 0 < steps[-1] < COUNT
    process = start(script, folder, tmp_path / "parts.pt", *agents)
    assert (process.communicate()[0], process.returncode) == ("ready\n", 0)
    assert (whole.communicate()[0], whole.returncode) == ("ready\n", 0)
    wanted, found = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "parts.pt")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING], "a damaged checkpoint"
    print(f"{KILLS} kills; newest checkpoints after each: {steps}")
