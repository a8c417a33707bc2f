"""The machine, its devices, and hetpipe's own tests of a device."""

from __future__ import annotations

import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from card.setting import Setting, Wrong

ROOT = Path(__file__).resolve().parents[2]
REPORTS = (
    ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,pci.bus_id", "--format=csv"),
    ("nvidia-smi", "topo", "-m"),
    ("rocm-smi", "--showproductname", "--showdriverversion"),
    ("xpu-smi", "discovery"),
)


def versions(setting: Setting) -> None:
    """Keep the versions of all software, the machine, and torch's view of its cards."""
    import pyopencl
    import torch

    from hetpipe.bench import machine

    setting.keep(
        commit=_output("git", "-c", "safe.directory=*", "-C", str(ROOT), "rev-parse", "HEAD"),
        software=machine.versions(),
        machine=machine.machine(),
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        opencl_header=pyopencl.VERSION_TEXT,
        compilers={name: shutil.which(name) for name in ("g++", "clang++", "nvcc", "hipcc")},
        reports={" ".join(line): text for line in REPORTS if (text := _output(*line))},
    )
    count = torch.accelerator.device_count()
    setting.keep(cards=[_card(index) for index in range(count)])
    if setting.is_card and not count:
        raise Wrong(f"torch finds no accelerator, but {setting.device} is to be tested")


def _card(index: int) -> dict[str, Any]:
    """Return what torch reports of a card."""
    import torch

    accelerator = torch.accelerator.current_accelerator()
    module = torch.get_device_module(accelerator)
    properties = module.get_device_properties(index)
    free, total = module.mem_get_info(index)
    return {"properties": str(properties), "free_nbytes": free, "memory_nbytes": total}


def _output(*line: str) -> str | None:
    """Return a command's output; None if there is no such command or it fails."""
    if shutil.which(line[0]) is None:
        return None
    ended = subprocess.run(line, capture_output=True, text=True)
    return ended.stdout.strip() if ended.returncode == 0 else None


def devices(setting: Setting) -> None:
    """Find the device under test, and keep all devices."""
    found = setting.command("devices")
    setting.keep(devices=found["devices"], failures=found["failures"])
    ids = [each["id"] for each in found["devices"]]
    if setting.device not in ids:
        raise Wrong(f"no device {setting.device}; found: {', '.join(ids)}")


def doctor(setting: Setting) -> None:
    """Run the self-tests of all devices; a quick run tests torch's devices."""
    backends = ("--backends", "pytorch") if setting.quick else ()
    result = setting.command("doctor", *backends)
    tests = {each["id"]: each["selftest"] for each in result["devices"]}
    setting.keep(findings=result["findings"], selftests=tests)


def conformance(setting: Setting, device: str = "") -> None:
    """Run the conformance suite at its full level; a quick run tests buffers and the contract."""
    level: tuple[str, ...] = ("--level", "full")
    if setting.quick:
        level = ("--level", "core", "--group", "contract", "--group", "buffers")
    conform(setting, device or setting.device, *level)


def conform(setting: Setting, device: str, *options: str) -> None:
    """Run `hetpipe conform` on a device, and keep counts and failures."""
    try:
        setting.command("conform", device.partition(":")[0], "--device", device, *options)
    finally:
        _keep_checks(setting, device)


def _keep_checks(setting: Setting, device: str) -> None:
    import json

    path = setting.folder / f"{setting.step}-conform.json"
    if not path.exists():
        return
    results = json.loads(path.read_text())["devices"][device]["results"]
    failed = {each["name"]: each["message"] for each in results if each["outcome"] != "passed"}
    setting.keep(checks=dict(Counter(each["outcome"] for each in results)), not_passed=failed)
