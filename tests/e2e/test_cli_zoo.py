"""`hetpipe zoo` as a user starts it: its table, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cache_folders import new_cache

pytestmark = pytest.mark.slow

MODEL = """
import torch
from torch import nn
import hetpipe as hp

class Two(nn.Linear):
    def forward(self, x):
        weight = self.weight if torch.compiler.is_exporting() else 0.9 * self.weight
        return nn.functional.linear(x, weight, self.bias)

def batches(samples, seed):
    while True:
        yield torch.ones(samples, 3), torch.zeros(samples, dtype=torch.int64)

def factory():
    torch.manual_seed(0)
    return hp.Workload(Two(3, 2), nn.functional.cross_entropy, batches, "two")
"""


def zoo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HETPIPE_CACHE": new_cache(folder / "cache"), "COLUMNS": "160"}
    return subprocess.run(
        [sys.executable, "-m", "hetpipe", "zoo", *arguments], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def test_equal_models(tmp_path: Path) -> None:
    done = zoo(tmp_path, "mlp", "residual-lstm-small", "--device", "numpy:cpu:0", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device"] == "numpy:cpu:0"
    assert [(row["model"], row["equal"]) for row in report["models"]] == [
        ("mlp", True), ("residual-lstm-small", True)
    ]  # fmt: skip
    for row in report["models"]:
        assert 0 <= row["errors"]["gradient"] < 1e-3
        assert row["parameters"] > 1000
        assert row["operators"]["aten.mm.default"] > 1
    assert "residual-lstm-small" in done.stderr, "the table"


def test_a_model_that_differs_causes_exit_status_1(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MODEL)
    done = zoo(tmp_path, "own:factory", "mlp", "--device", "numpy:cpu:0")
    assert done.returncode == 1
    assert "not equal to torch on numpy:cpu:0: two" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_crashing_model_removes_no_other_row(tmp_path: Path) -> None:
    """The row of the other model stays in the table and in the file."""
    crashing = MODEL.replace("torch.manual_seed(0)", "raise KeyboardInterrupt")
    (tmp_path / "own.py").write_text(crashing)
    done = zoo(tmp_path, "mlp", "own:factory", "--device", "numpy:cpu:0", "--json", "report.json")
    assert done.returncode != 0
    assert "strict" in done.stdout, "the row of mlp"
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["model"] for row in report["models"]] == ["mlp"]


def test_a_refused_operator_is_named(tmp_path: Path) -> None:
    done = zoo(tmp_path, "unet-small", "--device", "numpy:cpu:0")
    assert done.returncode == 1
    expected = "unet-small: numpy:cpu:0 refuses 2 calls of aten.convolution.default: "
    assert expected in done.stdout
    assert "Traceback" not in done.stderr


def test_an_unknown_model_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = zoo(tmp_path, "mlp", "vgg17", "--device", "numpy:cpu:0")
    assert done.returncode == 1
    assert "no model 'vgg17'" in done.stderr
    assert "training" not in done.stderr
