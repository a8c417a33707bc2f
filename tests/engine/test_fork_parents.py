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


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SPY + code], capture_output=True, text=True)


def answered(code: str, request: str) -> tuple[str, str]:
    """Return the first line that the code answers to a request, and all that it prints as errors.

    Its standard input stays open until then: the parent of a fork ends it when the input ends.
    """
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", SPY + code], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(request)
        process.stdin.flush()
        answer = process.stdout.readline()
        process.stdin.close()
        return answer, process.stderr.read()


@pytest.mark.slow
def test_the_parent_of_self_tests_asks_nothing() -> None:
    request = {
        "fork": 1, "environment": dict(os.environ), "folder": os.getcwd(), "path": sys.path,
        "arguments": ["hetpipe.backends.pytorch:PyTorchBackend", "pytorch:cpu:0"],
    }  # fmt: skip
    code = "from hetpipe.check.selftest_process import main; main(60.0)"
    answer, errors = answered(code, f"{json.dumps(request)}\n")
    assert '"ok": true' in answer, errors
    assert "forks after\n" in errors


@pytest.mark.slow
@pytest.mark.parametrize("module", ["hetpipe.worker.forkserver", "hetpipe.workbench.child"])
def test_the_import_of_a_parent_of_forks_asks_nothing(module: str) -> None:
    done = ran(f"import os, {module}; os.fork()")
    assert done.stderr == "forks after\n"
