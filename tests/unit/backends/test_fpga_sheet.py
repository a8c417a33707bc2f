"""The resource sheet of the FPGA kernels, and the board costs computed from it."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from hetpipe.backends.opencl.fpga.dataflow import ARRAY
from hetpipe.backends.opencl.fpga.sheet import (
    KernelSheet,
    design,
    loading,
    multiplying,
    normalising,
    normalising_channels,
    stage_sheet,
    storing,
    whole,
)
from hetpipe.backends.opencl.lower.launch import Kernel, Launch
from torch import nn

from hetpipe.capture import Captured
from hetpipe.cost import fpga
from hetpipe.cost.board import board
from hetpipe.cost.design import ProductDesign
from hetpipe.cost.work import Kernel as Work
from hetpipe.cost.work import ProductShape
from hetpipe.errors import CostError
from hetpipe.optim import sgd
from hetpipe.profile.described import described_table

DESIGN = ProductDesign(**design())  # type: ignore[arg-type]
STRATIX = board("stratix-10-gx2800")


def header(file: str) -> str:
    return files("hetpipe.kernels").joinpath(file).read_text().partition("#define")[0]


def test_the_source_declares_the_parameters_and_their_sheet() -> None:
    head = header("fpga/dataflow.cl")
    declared = dict(re.findall(r"([A-Z][A-Z_]+) (\d+)", head))
    assert [f"-D{name}={number}" for name, number in declared.items()] == list(ARRAY.options)
    lines = re.findall(r"//   (\w+) +(\d+) +(\d+) +(\d+) +(\d+)", head + header("fpga/rows.cl"))
    table = [KernelSheet(name, *map(int, row)) for name, *row in lines]
    assert table == [
        loading(ARRAY, "matmul_load"), multiplying(ARRAY), storing(ARRAY, "matmul"),
        whole(ARRAY, "matmul"), normalising(ARRAY), normalising_channels(ARRAY),
    ]  # fmt: skip


def test_little_interleaving_makes_additions_wait() -> None:
    assert multiplying(replace(ARRAY, interleave_rows=2, interleave_cols=2)).interval == 4
    assert multiplying(replace(ARRAY, interleave_rows=4, interleave_cols=4)).interval == 1


def test_a_stage_counts_each_kernel_once_and_names_kernels_without_a_sheet() -> None:
    options = (*ARRAY.options, "-DCHANNELS")
    kernels = [
        Kernel("a", "convolution_load", options), Kernel("a", "array", options),
        Kernel("a", "convolution_store", options), Kernel("a", "array", options),
        Kernel("b", "matmul", ARRAY.options), Kernel("c", "fused_1", generated=True),
        Kernel("d", "layer_norm"), Kernel("e", "normalise", (*options, "-DROWS")),
    ]  # fmt: skip
    sheet = stage_sheet([Launch(kernel, (1,), None, ()) for kernel in kernels])
    names = ["convolution_load", "array", "convolution_store", "matmul", "normalise"]
    assert [each.kernel for each in sheet.kernels] == names
    assert sheet.others == ("fused_1", "layer_norm")
    assert sheet.macs == 128 + 16 + 160 + 1
    assert sheet.block_ram_nbytes == sum(each.block_ram_nbytes for each in sheet.kernels)


def test_a_product_pays_for_whole_tiles() -> None:
    tile = ProductShape(1, 64, 128, 1000)
    assert DESIGN.cycles(tile) == 1000 * DESIGN.step_cycles + DESIGN.tile_cycles
    assert DESIGN.cycles(replace(tile, rows=65)) == 2 * DESIGN.cycles(tile)
    assert DESIGN.cycles(replace(tile, batches=3), arrays=2) == 2 * DESIGN.cycles(tile)
    full, thin = DESIGN.efficiency(tile), DESIGN.efficiency(replace(tile, rows=1))
    assert thin == pytest.approx(full / 64)
    # A step of k takes 76 cycles, because of loading; the array multiplies in only 64 of them.
    assert 0.8 < full < 64 / 76


def test_a_board_has_as_many_arrays_as_fit() -> None:
    assert STRATIX.fabric is not None
    by_dsp = 5760 * 0.59 / (160 * 1.33)
    assert DESIGN.arrays(STRATIX) == int(by_dsp)
    small = replace(STRATIX, fabric=replace(STRATIX.fabric, on_chip_nbytes=2_000_000))
    assert DESIGN.arrays(small) == 2_000_000 // DESIGN.block_ram_nbytes
    with pytest.raises(CostError, match=r"does not fit on stratix.* 388096 bytes .* and 300000"):
        DESIGN.arrays(replace(STRATIX, fabric=replace(STRATIX.fabric, on_chip_nbytes=300_000)))
    with pytest.raises(CostError, match="it is no FPGA"):
        DESIGN.arrays(board("t4"))


def test_the_design_times_products_and_the_dsps_time_the_other_kernels() -> None:
    assert STRATIX.fabric is not None
    shape = ProductShape(1, 640, 1280, 2000)
    product = Work(2.0 * shape.macs, 4_000, (shape,))
    other = Work(1e9, 4_000)
    by_design_s = DESIGN.cycles(shape, DESIGN.arrays(STRATIX)) / STRATIX.fabric.clock_Hz
    rest_s = fpga.kernels_s(STRATIX, [other])
    both_s = fpga.kernels_s(STRATIX, [product, other], design=DESIGN)
    assert both_s == pytest.approx(rest_s + by_design_s)
    assert fpga.kernels_s(STRATIX, [other], design=DESIGN) == rest_s


def test_a_design_changes_the_costs_of_a_board() -> None:
    """A batch of 8 fills an eighth of a tile's rows, and the costs with a design show it."""
    model = nn.Sequential(nn.Linear(216, 256), nn.Tanh(), nn.Linear(256, 4))
    batch = (torch.randn(8, 216), torch.randint(4, (8,)))
    captured = Captured(model, nn.functional.cross_entropy, batch)
    shared, designed = (
        described_table(captured, {"board": STRATIX}, {}, 8, sgd(0.1), designs=designs)
        for designs in (None, {STRATIX.id: DESIGN})
    )
    first, same = (table.devices["board"].layers[0] for table in (designed, shared))
    cycles = DESIGN.cycles(ProductShape(1, 8, 256, 216), DESIGN.arrays(STRATIX))
    assert first.forward_s == pytest.approx(STRATIX.launch_s + cycles / 273e6, rel=0.01)
    assert same.forward_s < first.forward_s
    assert same.update_s == first.update_s  # the layer's update has no product


def test_the_page_on_boards_has_the_numbers_of_the_design() -> None:
    page = (Path(__file__).parents[3] / "docs" / "boards.md").read_text(encoding="utf-8")
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    lines = block[1].splitlines()
    exec("\n".join(line for line in lines if line.startswith(("from", "ours ="))), names)
    ours = names["ours"]
    assert "tiles of 64 x 128; in 76 cycles" in block[1]
    assert (ours.tile_rows, ours.tile_cols, ours.step_cycles) == (64, 128, 76)
    said = [line.split("  # ") for line in lines if line.startswith("ours.")]
    assert len(said) == 3
    for code, comment in said:
        assert eval(code, names) == pytest.approx(float(comment.split()[0]), abs=0.005)
