"""OpenCL on the card: discovery, basic conformance, and products beside torch's."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from card.machine import conform
from card.setting import Setting, Skipped

NVIDIA = "libnvidia-opencl.so.1"
VENDORS = Path("/etc/OpenCL/vendors")


def opencl(setting: Setting) -> None:
    """Find an OpenCL device of a card, or of the CPU if a CPU is under test; then test it."""
    if setting.is_card:
        register_nvidia(setting.folder)
    found = setting.command("devices", "--backends", "opencl")
    setting.keep(devices=found["devices"], failures=found["failures"])
    kind = "gpu" if setting.is_card else "cpu"
    able = [
        each
        for each in found["devices"]
        if each["kind"] == kind and not each["capabilities"]["emulated"]
    ]
    if not able:
        raise Skipped(f"no OpenCL runtime finds a device of kind {kind}: see docs/cards.md")
    device = able[0]["id"]
    setting.keep(device=device)
    _products(setting, device)
    groups = ("contract", "buffers") if setting.quick else ()
    options = [part for group in groups for part in ("--group", group)]
    conform(setting, device, "--level", "core", *options)


def register_nvidia(folder: Path) -> None:
    """Register NVIDIA's runtime for this process if the driver has it and no file names it."""
    registered = [path.read_text() for path in VENDORS.glob("*.icd")] if VENDORS.is_dir() else []
    if "OCL_ICD_VENDORS" in os.environ or any("nvidia" in text for text in registered):
        return
    with suppress(OSError):
        ctypes.CDLL(NVIDIA)
        own = folder / "vendors"
        own.mkdir(exist_ok=True)
        (own / "nvidia.icd").write_text(f"{NVIDIA}\n")
        os.environ["OCL_ICD_VENDORS"] = str(own)


def _products(setting: Setting, device_id: str) -> None:
    """Keep the GFLOP/s of float32 products on the OpenCL device and in torch on the card."""
    import torch
    from benchmarks.steprates import in_turns

    from hetpipe.bench.kernelcases import product
    from hetpipe.bench.kernelrates import error_of, resident
    from hetpipe.sdk.host.registry import open_device

    torch.backends.cuda.matmul.allow_tf32 = False
    device = open_device(device_id)
    rows = {}
    for n in (256, 512) if setting.quick else (1024, 4096):
        case = product("mm", n, n, n, torch.mm)
        tensors = [torch.randn(shape) for shape in case.shapes]
        ours, fetch = resident(device, case, tensors)
        a, b = (tensor.to(setting.torch_name) for tensor in tensors)

        def theirs(a: torch.Tensor = a, b: torch.Tensor = b) -> None:
            torch.mm(a, b)
            if setting.is_card:
                torch.accelerator.synchronize(a.device)

        contenders: dict[str, Callable[[], object]] = {"opencl": ours, "torch": theirs}
        times = in_turns(contenders, 0.2, 3)
        rows[n] = {name: case.operations / min(each) / 1e9 for name, each in times.items()}
        rows[n]["error"] = error_of(case, tensors, fetch())
        setting.keep(product_gflops=rows)
