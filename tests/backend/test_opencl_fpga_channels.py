"""Kernels joined by channels, on Intel's FPGA emulator with channels of the declared depth.

Each test runs a separate process with a time limit, since kernels that wait for each other can be
ended in no other way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from as_fpga import as_fpga
from fpga_cases import CASES, CHANNELLED, EMULATOR
from hetpipe.backends.opencl.fpga.dataflow import ARRAY
from hetpipe.backends.opencl.fpga.sheet import normalising_channels, stage_sheet
from opencl_devices import IDS, Array, compiled

HERE = Path(__file__).parent
SETTINGS = {
    "CL_CONFIG_CHANNEL_DEPTH_EMULATION_MODE": "strict", "PYTHONPATH": str(HERE.parent),
}  # fmt: skip
LIMIT_S = 250

pytestmark = pytest.mark.skipif(
    EMULATOR not in IDS, reason="no FPGA emulator: pip install 'hetpipe[emulators]'"
)


def run(*arguments: str) -> str:
    """Run Python with strict channels in a new process and return its output."""
    done = subprocess.run(
        [sys.executable, *arguments], env=os.environ | SETTINGS, cwd=HERE, capture_output=True,
        text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 0, f"exit {done.returncode} after\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Array]]:
    """The results of all cases by form: channels, buffers."""
    folder = tmp_path_factory.mktemp("forms")
    files = {form: folder / f"{form}.npz" for form in ("channels", "buffers")}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda form: run("fpga_cases.py", str(files[form]), form), files))
    loaded = {form: np.load(file) for form, file in files.items()}
    return {form: dict(arrays) for form, arrays in loaded.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANNELLED)
def test_channels_and_buffers_give_the_same_bits(
    forms: dict[str, dict[str, Array]], name: str
) -> None:
    fn, inputs = CASES[name]
    expected = fn(*(each.double() for each in inputs))
    expected = expected if isinstance(expected, tuple) else (expected,)
    for number, tensor in enumerate(expected):
        want = tensor.numpy()
        with_channels, without = (forms[form][f"{name} {number}"] for form in forms)
        np.testing.assert_array_equal(with_channels, without)
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(with_channels, want, rtol=0, atol=64 * 2.0**-23 * scale)


def test_a_product_is_three_concurrent_kernels_of_one_program() -> None:
    fn, inputs = CASES["epilogue"]
    launches = compiled(as_fpga(EMULATOR), fn, *inputs)._lowered.launches
    assert [launch.kernel.name for launch in launches] == ["matmul_load", "array", "matmul_store"]
    assert [launch.beside for launch in launches] == [1, 2, 0]
    assert len({(launch.kernel.source, launch.kernel.options) for launch in launches}) == 1
    assert f"-DCAPACITY={ARRAY.capacity}" in launches[0].kernel.options


def test_a_norm_of_a_product_is_a_fourth_kernel() -> None:
    fn, inputs = CASES["layer norm"]
    launches = compiled(as_fpga(EMULATOR), fn, *inputs)._lowered.launches
    names = ["matmul_load", "array", "matmul_store", "normalise"]
    assert [launch.kernel.name for launch in launches] == names
    assert [launch.beside for launch in launches] == [1, 2, 3, 0]
    sheet = stage_sheet(launches)
    assert [each.kernel for each in sheet.kernels] == names
    assert (sheet.others, sheet.macs) == ((), 128 + 32 + 1)


def test_a_batch_norm_is_a_fourth_kernel_that_stores_sums() -> None:
    fn, inputs = CASES["batch norm"]
    launches = compiled(as_fpga(EMULATOR), fn, *inputs)._lowered.launches
    names = ["convolution_load", "array", "convolution_store", "normalise"]
    assert [launch.kernel.name for launch in launches[:4]] == names
    assert stage_sheet(launches[:4]).kernels[3] == normalising_channels(ARRAY)


def test_with_channels_only_one_pass_runs_at_a_time() -> None:
    """The emulator can run two passes at once, but each channel exists only once."""
    with_channels, without = (as_fpga(EMULATOR, channels).info for channels in (True, False))
    assert (with_channels.capabilities.queues, without.capabilities.queues) == (1, 2)
    assert not with_channels.capabilities.chunks
    assert with_channels.driver.endswith(", family fpga with channels")
    assert without.driver.endswith(", family fpga")


HANGS = """
import os, sys, time
import numpy as np
import torch
from as_fpga import as_fpga
from fpga_cases import EMULATOR
from hetpipe.errors import BackendError
from opencl_devices import compiled, upload
device = as_fpga(EMULATOR)
device.dataflow_limit_s = 2.0
inputs = torch.ones(200, 300), torch.ones(300, 300)  # more sums than a channel holds
product = compiled(device, torch.mm, *inputs)
buffers, events = upload(device, *inputs)
_, end, _ = product.run(buffers, after=events)
end.wait()
for step in product._steps:
    if step.kernel.function_name == KERNEL:
        step.kernel.set_arg(ROWS, np.int32(NUMBER))
_, end, _ = product.run(buffers, after=events)
try:
    end.wait()
except BackendError as error:
    print(error)
device.close()  # it waits no more
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "argument", "rows", "hanging"),
    [
        ("matmul_store", 1, 0, "matmul_load runs, array runs"),  # a consumer that ends at once
        ("matmul_store", 1, 400, "matmul_store runs"),  # a consumer that expects more than is sent
    ],
)
def test_the_error_for_a_hanging_dataflow_names_its_kernels(
    kernel: str, argument: int, rows: int, hanging: str
) -> None:
    head = f"KERNEL, ROWS, NUMBER = {kernel!r}, {argument}, {rows}\n"
    said = run("-c", head + HANGS)
    assert "is still running a graph and none of its kernels has ended for 2.0 s" in said
    assert said.strip().endswith(hanging)
