"""A backend defined in the user's script trains in worker processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BACKEND = """
from dataclasses import replace

import torch

import hetpipe as hp
from hetpipe.backends.numpy import NumpyBackend


@hp.register_backend
class Mine(NumpyBackend):
    name = "mine"

    def discover(self):
        return [replace(info, id="mine:cpu:0", backend="mine") for info in super().discover()]


def train():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    cluster = hp.Cluster.local(devices=["mine:cpu:0", "numpy:cpu:0"])
    with hp.Pipeline(
        model, torch.nn.functional.mse_loss, (x, y), cluster=cluster,
        optimizer=hp.optim.sgd(lr=0.1), cuts=[1], microbatches=2, schedule="gpipe",
    ) as pipe:
        print("losses", [pipe.step(x, y) for _ in range(2)])

"""


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=path, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["script.py"], ["-m", "script"]], ids=["file", "module"])
def test_the_script_trains_in_worker_processes(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "script.py").write_text(BACKEND + 'if __name__ == "__main__":\n    train()\n')
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert "losses" in done.stdout


@pytest.mark.slow
def test_a_missing_main_guard_is_reported(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BACKEND + "train()\n")
    done = run(tmp_path, "script.py")
    assert done.returncode != 0
    assert "script.py trains while a worker loads the backend" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
