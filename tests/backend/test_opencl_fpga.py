"""The kernels for FPGAs without channels, on every OpenCL device of this machine."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from as_fpga import as_fpga
from fpga_cases import CASES, Case, normal
from hetpipe.backends.opencl.fpga.dataflow import ROW_COLS
from oclgrind import ORACLE, log_of
from opencl_devices import close_to_torch, compiled, results
from opencl_products import OPENCL
from torch.nn import functional

MODELS = [device_id for device_id in OPENCL if "fpga" not in device_id]

batch_norm = torch.ops.aten._native_batch_norm_legit.no_stats


def kernels_of(device_id: str, case: Case) -> list[str]:
    """Return the names of a case's kernels."""
    fn, inputs = case
    return [
        each.kernel.name for each in compiled(as_fpga(device_id), fn, *inputs)._lowered.launches
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device_id", MODELS)
def test_products_and_convolutions_with_their_gradients(device_id: str, name: str) -> None:
    fn, inputs = CASES[name]
    close_to_torch(as_fpga(device_id), fn, *inputs)


@pytest.mark.parametrize("device_id", MODELS)
def test_the_kernel_of_a_product_computes_its_epilogue(device_id: str) -> None:
    assert kernels_of(device_id, CASES["epilogue"]) == ["matmul"]


@pytest.mark.parametrize("name", ["softmax", "log softmax", "layer norm"])
@pytest.mark.parametrize("device_id", MODELS)
def test_rows_of_a_product_are_normalised_in_its_dataflow(device_id: str, name: str) -> None:
    assert kernels_of(device_id, CASES[name]) == ["matmul"]


@pytest.mark.parametrize("device_id", MODELS)
def test_rows_too_long_for_the_chip_are_normalised_from_memory(device_id: str) -> None:
    inputs = normal(5, 6), normal(6, ROW_COLS + 1)

    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.softmax(a @ b, 1)

    assert kernels_of(device_id, (fn, inputs)) == ["matmul", "softmax_rows"]
    close_to_torch(as_fpga(device_id), fn, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("device_id", MODELS)
def test_channels_of_a_convolution_are_normalised_in_its_dataflow(device_id: str) -> None:
    def fn(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        y = functional.conv2d(x, w) + b[:, None, None]
        return batch_norm(y, b, b, True, 0.1, 1e-5)[0]

    inputs = normal(3, 2, 7, 6), normal(5, 2, 3, 3), normal(5)
    assert kernels_of(device_id, (fn, inputs)) == ["convolution"]
    close_to_torch(as_fpga(device_id), fn, *inputs)


@pytest.mark.slow
@pytest.mark.parametrize("device_id", MODELS)
def test_rows_of_images_are_normalised_from_memory(device_id: str) -> None:
    """Channels of a product are not its rows either, so both norms read memory."""

    def fn(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = functional.conv2d(x, w)
        normed = batch_norm((a @ a.t())[None], None, None, True, 0.1, 1e-5)[0]
        return torch.softmax(y, -1), functional.layer_norm(y, y.shape[-1:]), normed

    close_to_torch(as_fpga(device_id), fn, normal(2, 3, 5, 6), normal(4, 3, 2, 2), normal(6, 7))


@pytest.mark.slow
@pytest.mark.parametrize("device_id", MODELS)
def test_nothing_joins_a_product_after_its_norm(device_id: str) -> None:
    """The reader of normalised rows is a separate kernel, as is a second norm of the rows."""

    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a @ b
        soft = torch.softmax(product, 1)
        return soft * 2 + product, torch.log_softmax(product, 1), product.tanh()

    close_to_torch(as_fpga(device_id), fn, normal(9, 20), normal(20, 33))


@pytest.mark.parametrize("device_id", MODELS)
def test_products_of_all_sizes_share_a_program(device_id: str) -> None:
    """On a board, each program would be a separate array."""
    device = as_fpga(device_id)
    kernels = {
        launch.kernel
        for size in (3, 200)
        for launch in compiled(device, lambda a: a @ a, normal(size, size))._lowered.launches
    }
    assert len(kernels) == 1


@pytest.mark.skipif(len(MODELS) < 2, reason="one OpenCL device alone")
def test_all_devices_give_the_same_bits() -> None:
    """Compilers may vectorise, but the fused multiply-adds have one order."""
    fn, inputs = CASES["mm 65 x 300 x 129"]
    first, *others = (results(as_fpga(device_id), fn, *inputs) for device_id in MODELS)
    for other in others:
        for one, two in zip(first, other, strict=True):
            np.testing.assert_array_equal(one, two)


CHECKED = """
import torch
from as_fpga import as_fpga
from fpga_cases import normal as x
from opencl_devices import close_to_torch
from torch.nn import functional
device = as_fpga("opencl:oclgrind:0")
def convolve(a, w, dy):
    y, gradients = torch.func.vjp(lambda a, w: functional.conv2d(a, w, stride=2, padding=1), a, w)
    return y, *gradients(dy)
close_to_torch(device, lambda a, b: (a @ b).tanh(), x(5, 19), x(19, 34))
close_to_torch(device, lambda a, w: torch.ops.aten._native_batch_norm_legit.no_stats(functional.conv2d(a, w), None, None, True, 0.1, 1e-5), x(2, 2, 3, 4), x(3, 2, 2, 2))
close_to_torch(device, convolve, x(1, 2, 5, 4), x(3, 2, 3, 3), x(1, 3, 3, 2))
"""  # noqa: E501 - one graph a line


@pytest.mark.slow
@pytest.mark.skipif(ORACLE is None, reason="no Oclgrind: pip install 'hetpipe[emulators]'")
def test_no_races_and_no_access_outside(tmp_path: Path) -> None:
    assert log_of(CHECKED, tmp_path, "OCLGRIND_DATA_RACES") == ""
