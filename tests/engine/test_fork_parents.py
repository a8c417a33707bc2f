"""A process that forks asks no driver whether there is a card: its forks could not use the card."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SPY = """
import sys
import torch

asked = []

def spied(module, name):
    real = getattr(module, name)
    def ask(*args, **kwargs):
        asked.append(f"{module.__name__}.{name}")
        return real(*args, **kwargs)
    setattr(module, name, ask)

for module in (torch.cuda, torch.xpu, torch.mps, torch.accelerator):
    for name in ("is_available", "device_count", "_lazy_init", "current_accelerator"):
        if hasattr(module, name):
            spied(module, name)

def at_fork(event, args):
    if event == "os.fork":
        print("forks", "after", *asked, file=sys.stderr)

sys.addaudithook(at_fork)
"""


def ran(code: str, requests: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SPY + code], input=requests, capture_output=True, text=True
    )


@pytest.mark.slow
def test_the_parent_of_self_tests_asks_nothing() -> None:
    request = {
        "fork": 1, "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path,
        "arguments": ["hetpipe.backends.pytorch:PyTorchBackend", "pytorch:cpu:0"],
    }  # fmt: skip
    code = "from hetpipe.check.selftest_process import main; main(60.0)"
    done = ran(code, f"{json.dumps(request)}\n")
    assert '"ok": true' in done.stdout, done.stderr
    assert "forks after\n" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hetpipe.worker.forkserver", "hetpipe.workbench.child"])
def test_the_import_of_a_parent_of_forks_asks_nothing(module: str) -> None:
    done = ran(f"import os, {module}; os.fork()")
    assert done.stderr == "forks after\n"
