"""Modelled costs: the roofline of processors, FPGAs, and the operations of models for boards."""

from __future__ import annotations

import itertools
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from found_devices import trace
from torch import nn

from hetpipe.capture import Captured
from hetpipe.cost import fpga, gpu
from hetpipe.cost.board import Board, board
from hetpipe.cost.pipedream_profile import read_profile
from hetpipe.cost.work import Kernel
from hetpipe.errors import CostError
from hetpipe.optim import sgd
from hetpipe.profile.count import count_calls, layer_work
from hetpipe.profile.described import described_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture
def data() -> Path:
    folder = os.environ.get("HETPIPE_DATA")
    if not folder:
        pytest.skip("HETPIPE_DATA is unset: it names the folder of the published profiles")
    return Path(folder)


STEPS = 40


def calibrate(
    v100: Board,
    measured: Sequence[tuple[Kernel, float]],
    others: Sequence[tuple[Kernel, float]] = (),
) -> gpu.Shares:
    """Return the shares with the least median error on measured kernels, given their seconds.

    The error is measured on `others`, or without any on the same kernels.
    """

    def errors(shares: gpu.Shares, kernels: Sequence[tuple[Kernel, float]]) -> list[float]:
        pairs = [(gpu.kernels_s(v100, [kernel], shares), s) for kernel, s in kernels]
        return [abs(predicted_s / seconds - 1) for predicted_s, seconds in pairs]

    def rank(shares: gpu.Shares) -> tuple[float, float]:
        trial = errors(shares, measured)
        return statistics.median(trial), statistics.fmean(trial)

    grid = [(n + 1) / STEPS for n in range(STEPS)]
    trials = [gpu.Shares(a, b, 0.0) for a, b in itertools.product(grid, grid)]
    best = min(trials, key=rank)
    return replace(best, error=statistics.median(errors(best, others or measured)))


class TestRoofline:
    def test_the_slower_of_operations_and_bytes_and_the_launch(self) -> None:
        v100, shares = board("v100-pcie-16"), gpu.Shares(0.5, 0.25, 0.0)
        peak, bandwidth_Bps = v100.peak_flops["float32"], v100.memory_Bps
        computing = gpu.kernels_s(v100, [Kernel(peak, 1)], shares)
        moving = gpu.kernels_s(v100, [Kernel(1, int(bandwidth_Bps))], shares)
        assert computing == pytest.approx(2.0 + v100.launch_s)
        assert moving == pytest.approx(4.0 + v100.launch_s)
        both = gpu.kernels_s(v100, [Kernel(peak, 1), Kernel(1, int(bandwidth_Bps))], shares)
        assert both == pytest.approx(computing + moving)

    def test_a_dtype_without_a_peak(self) -> None:
        with pytest.raises(CostError, match="gtx-1080-ti has no peak for float16; it has float32"):
            gpu.kernels_s(board("gtx-1080-ti"), [Kernel(1, 1)], dtype="float16")

    def test_calibration_finds_the_shares_of_artificial_kernels(self) -> None:
        v100, true = board("v100-pcie-16"), gpu.Shares(0.6, 0.4, 0.0)
        kernels = [Kernel(10.0**n, 10 ** (20 - n)) for n in range(8, 13)]
        measured = [(kernel, gpu.kernels_s(v100, [kernel], true)) for kernel in kernels]
        found = calibrate(v100, measured)
        assert (found.matrix, found.memory) == (0.6, 0.4)
        assert found.error < 1e-9

    def test_the_shares_of_the_v100_follow_from_published_profiles(self, data: Path) -> None:
        measured = [
            pair
            for name, samples in (("vgg16", 128), ("alexnet", 256), ("resnet50", 128))
            for pair in published_kernels(data / "profiles" / "pipedream" / f"{name}.txt", samples)
        ]
        found = calibrate(board("v100-pcie-16"), measured[::2], measured[1::2])
        print(f"V100: {found}, {len(measured) // 2} layers each")
        assert (found.matrix, found.memory) == (gpu.V100.matrix, gpu.V100.memory)
        assert found.error == pytest.approx(gpu.V100.error, abs=0.001)

    def test_the_error_is_larger_on_a_model_outside_the_calibration(self, data: Path) -> None:
        """With shares from VGG-16 and AlexNet, the median layer of ResNet-50 is off by 50 %."""
        folder = data / "profiles" / "pipedream"
        measured = [
            pair
            for name, samples in (("vgg16", 128), ("alexnet", 256))
            for pair in published_kernels(folder / f"{name}.txt", samples)
        ]
        others = list(published_kernels(folder / "resnet50.txt", 128))
        shares = calibrate(board("v100-pcie-16"), measured, others)
        print(f"V100 without ResNet-50: {shares}, {len(measured)} and {len(others)} layers")
        assert shares.error == pytest.approx(0.50, abs=0.01)
        assert shares.error > gpu.V100.error


def published_kernels(path: Path, samples: int) -> Iterator[tuple[Kernel, float]]:
    """Yield the forwards of a profile that take 0.1 ms or more, with operations by their
    descriptions."""
    profile = read_profile(path)
    by_name = {node.name: node for node in profile.nodes}
    for node in profile.nodes:
        if node.forward_s <= 1e-4 or node.description.startswith("Input"):
            continue
        convolution = re.match(
            r"Conv2d\((\d+), (\d+), kernel_size=\((\d+), (\d+)\)", node.description
        )
        linear = re.match(r"Linear\(in_features=(\d+), out_features=(\d+)", node.description)
        outputs = node.activation_nbytes / 4
        if convolution:
            inputs, _, height, width = map(int, convolution.groups())
            operations = 2 * outputs * inputs * height * width
        elif linear:
            inputs, features = map(int, linear.groups())
            operations = 2.0 * samples * inputs * features
        else:
            operations = outputs
        read = sum(
            by_name[w].activation_nbytes for w, reader in profile.edges if reader == node.name
        )
        read = read or samples * 3 * 224 * 224 * 4
        nbytes = read + node.activation_nbytes + node.params_nbytes
        yield Kernel(operations, nbytes), node.forward_s


class TestFpga:
    def measured(self, data: Path) -> dict[str, tuple[object, float]]:
        """Return fabrics at the clocks of measured matrix products, with their operations per
        second."""
        boards = {"520N": "stratix-10-gx2800", "U280, HBM": "u280", "U280, DDR": "u280"}
        boards |= {"D5005": "pac-d5005", "VCU1525": "vcu118"}
        text = (data / "expected" / "fpga_gemm.toml").read_text(encoding="utf-8")
        designs = {}
        for entry in tomllib.loads(text)["board"]:
            name = next(key for key in boards if key in entry["name"])
            fabric = board(boards[name]).fabric
            assert fabric is not None
            design = replace(fabric, dsp=entry["dsp"], clock_Hz=entry["clock_MHz"] * 1e6)
            designs[name] = design, entry["gflops"] * 1e9
        return designs

    def error(self, designs, pair) -> float:
        """Return the median error on the other boards after a calibration on two."""
        rates = [rate / fpga.throughput(fabric, working=1.0)
                 for fabric, rate in map(designs.__getitem__, pair)]  # fmt: skip
        working = statistics.median(rates)
        return statistics.median(
            abs(fpga.throughput(fabric, working=working) / rate - 1)
            for name, (fabric, rate) in designs.items()
            if name not in pair
        )

    def test_two_boards_predict_the_other_three(self, data: Path) -> None:
        """Calibrate on boards of two vendors that are neither their best nor their worst: 24 %.

        With both boards of one vendor, or with the best board, the error is up to 65 %.
        """
        designs = self.measured(data)
        errors = {pair: self.error(designs, pair) for pair in itertools.combinations(designs, 2)}
        for pair, error in sorted(errors.items(), key=lambda item: item[1]):
            print(f"calibrated on {' and '.join(pair)}: median error {100 * error:.0f} %")
        assert errors["U280, HBM", "D5005"] == pytest.approx(fpga.ERROR, abs=0.005)

    def test_bytes_beyond_the_chip_cross_the_memory(self) -> None:
        vcu118 = board("vcu118")
        assert vcu118.fabric is not None
        inside = Kernel(1.0, vcu118.fabric.on_chip_nbytes)
        beyond = Kernel(1.0, vcu118.fabric.on_chip_nbytes + int(vcu118.memory_Bps))
        assert fpga.kernels_s(vcu118, [inside]) == pytest.approx(vcu118.launch_s, rel=1e-3)
        expected_s = vcu118.launch_s + 1 / fpga.MEMORY_SHARE
        assert fpga.kernels_s(vcu118, [beyond]) == pytest.approx(expected_s)

    def test_refusals(self) -> None:
        with pytest.raises(CostError, match="has no fabric"):
            fpga.kernels_s(board("t4"), [Kernel(1, 1)])
        with pytest.raises(CostError, match="no DSPs are given for bfloat16"):
            fpga.throughput(board("vcu118").fabric, "bfloat16")  # type: ignore[arg-type]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).flatten(1))


@pytest.fixture(scope="module")
def captured() -> Captured:
    example = torch.zeros(4, 3, 6, 6), torch.zeros(4, dtype=torch.int64)
    return Captured(Net(), nn.functional.cross_entropy, example)


class TestCounting:
    def test_products_by_hand(self, captured: Captured) -> None:
        """Compare the operations of a convolution and a linear layer with counts by hand."""
        count = len(captured.layer_graph(4).layers)
        stages = captured.stage_graphs(
            range(1, count), [{}] * count, [4], sgd(0.1, momentum=0.9), extras=()
        )
        work = {
            layer.name: layer_work(stage, 4)
            for layer, stage in zip(captured.layer_graph(4).layers, stages, strict=True)
        }
        convolution = 2 * 4 * 8 * 36 * 3 * 9
        linear = 2 * 4 * (8 * 36) * 10
        assert max(k.operations for k in work["conv"].forward) == convolution
        assert max(k.operations for k in work["fc"].forward) == linear
        # the first layer has no gradient of its input; the last one has two products
        assert max(k.operations for k in work["conv"].backward) == convolution
        products = sorted(k.operations for k in work["fc"].backward)[-2:]
        assert products == [linear, linear]
        parameters = 8 * 36 * 10 + 10
        assert sum(k.nbytes for k in work["fc"].update) >= 4 * 3 * parameters

    def test_a_table_for_boards_that_are_absent(self, captured: Captured) -> None:
        boards = {"a": board("a100-40"), "b": board("t4"), "c": board("vcu118")}
        table = described_table(captured, boards, {}, 4, sgd(0.1, momentum=0.9))
        assert {cost.label for cost in table.devices.values()} == {"modelled"}
        assert table.devices["c"].execution == "async"
        names = [layer.name for layer in captured.layer_graph(4).layers]
        assert [layer.name for layer in table.layers] == names
        for id, there in boards.items():
            assert table.devices[id].memory_nbytes == there.memory_nbytes
            assert all(layer.backward_s > 0 for layer in table.devices[id].layers)

    def test_more_samples_take_longer(self, captured: Captured) -> None:
        boards = {"a": board("a100-40"), "c": board("vcu118")}
        few, many = (described_table(captured, boards, {}, n, sgd(0.1)) for n in (4, 64))
        for id in boards:
            spans = [(table, (id, 0, len(table.layers))) for table in (few, many)]
            few_s, many_s = (table.forward_s(*span) for table, span in spans)
            assert few_s < many_s < 16 * few_s * 1.001


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention", "lstm_layer"])
def test_our_own_operators_count_their_products(name: str) -> None:
    """Attention in gpt and the layer in lstm have far more operations than result elements."""
    from hetpipe.zoo.load import load_workload

    workload = load_workload("gpt" if name == "attention" else "lstm")
    example = next(workload.batches(4, 0))
    captured = Captured(workload.model, workload.loss_fn, example)
    count = len(captured.layer_graph(4).layers)
    stages = captured.stage_graphs(range(1, count), [{}] * count, [4], sgd(0.1), extras=())
    programs = [stage.passes[4].forward.graph.graph for stage in stages]
    nodes = [node for graph in programs for node in graph.nodes if f".{name}." in str(node.target)]
    assert nodes
    work = [layer_work(stage, 4) for stage in stages]
    most = max(kernel.operations for each in work for kernel in each.forward)
    results = [node.meta["val"] for node in nodes]
    first = results[0][0] if isinstance(results[0], (tuple, list)) else results[0]
    assert most > 10 * first.numel()


@pytest.mark.parametrize("front", [(2, 3), (6,)])
def test_an_attentions_gradients_count_five_products(front: tuple[int, ...]) -> None:
    own: Any = torch.ops.hetpipe
    length, keys, width = 5, 7, 4
    query, key, value = (torch.randn(*front, n, width) for n in (length, keys, keys))
    out, sums = own.attention(query, key, value, False, 0.5)
    inputs = [out, query, key, value, out, sums]
    graph = trace(lambda *each: own.attention_backward(*each, False, 0.5), inputs, {})
    counted = {str(node.target): kernel for node, kernel in count_calls(graph.graph)}
    product = 2 * 6 * length * keys * width
    assert counted["hetpipe.attention_backward.default"].operations == 5 * product
