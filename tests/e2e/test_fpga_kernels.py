"""A multilayer perceptron and a CNN train with FPGA kernels, and their losses equal torch's.

Channels have the depth that the kernels declare. A process that hangs is ended at a time limit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hetpipe as hp

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("fpga_training.py")
SETTINGS = {
    "CL_CONFIG_CHANNEL_DEPTH_EMULATION_MODE": "strict", "PYTHONPATH": str(SCRIPT.parent.parent),
}  # fmt: skip
LIMIT_S = 250


@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_losses_equal_torch(network: str) -> None:
    found, _ = hp.discover_devices(["opencl"])
    if not any(d.kind == "fpga" and d.capabilities.emulated for d in found):
        pytest.skip("no FPGA emulator: install the extra `emulators`")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), network], env=os.environ | SETTINGS, capture_output=True,
        text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["losses"] == pytest.approx(report["expected"], rel=1e-5)
    assert report["losses"][-1] < 0.95 * report["losses"][0]
