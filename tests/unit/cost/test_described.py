"""Models on boards: operations compared with torch's count, each pattern counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from hetpipe.capture import Captured
from hetpipe.cost import gpu
from hetpipe.cost.board import board
from hetpipe.cost.table import LinkCost
from hetpipe.errors import CostError
from hetpipe.optim import sgd
from hetpipe.profile import described
from hetpipe.profile.count import count_calls, layer_work
from hetpipe.sdk.graph import operator_name
from hetpipe.sdk.host import registry

SAMPLES = 4
BOARDS = {"gpu": board("v100-pcie-16"), "fpga": board("vcu118"), "cpu": board("desktop-cpu")}

PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.convolution.", "aten.convolution_backward.")


class Net(nn.Module):
    """Convolutions, a stride, batch norm, and three equal linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.enter = nn.Linear(16 * 9, 24)
        self.alike = nn.ModuleList(nn.Linear(24, 24) for _ in range(3))
        self.leave = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.conv2(torch.relu(self.norm(self.conv1(x)))))
        x = torch.relu(self.enter(x.flatten(1)))
        for layer in self.alike:
            x = torch.relu(layer(x))
        return self.leave(x)


@pytest.fixture(scope="module")
def captured() -> Captured:
    torch.manual_seed(0)
    return Captured(Net(), nn.functional.cross_entropy, example())


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(SAMPLES, 3, 8, 8), torch.zeros(SAMPLES, dtype=torch.int64)


def test_operations_of_products_equal_the_count_of_torch(captured: Captured) -> None:
    """Compare with torch over forward and backward of the whole model, in its layers' graphs."""
    x, y = example()
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(Net()(x), y).backward()
    count = len(captured.layer_graph(SAMPLES).layers)
    stages = captured.stage_graphs(range(1, count), [{}] * count, [SAMPLES], sgd(0.1), extras=())
    operations = 0.0
    for stage in stages:
        passes = stage.passes[SAMPLES]
        assert passes.backward is not None
        for program in (passes.forward, passes.backward):
            for node, kernel in count_calls(program.graph.graph):
                if operator_name(node).startswith(PRODUCTS):
                    operations += kernel.operations
    assert operations == counter.get_total_flops()


def test_layers_of_one_pattern_are_counted_once_and_no_device_is_opened(
    captured: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def counting(stage: object, samples: int) -> object:
        seen.append(stage)
        return layer_work(stage, samples)  # type: ignore[arg-type]

    def refuse(*_: object) -> None:
        raise AssertionError("a device is opened")

    monkeypatch.setattr(described, "layer_work", counting)
    monkeypatch.setattr(registry, "open_device", refuse)
    table = described.described_table(captured, BOARDS, {}, SAMPLES, sgd(0.1))
    names = [layer.name for layer in table.layers]
    alike = [n for n, name in enumerate(names) if name.startswith("alike")]
    assert len(alike) == 3
    assert len(seen) == len(names) - 2
    for cost in table.devices.values():
        assert len({cost.layers[n] for n in alike}) == 1


def test_a_table_has_the_boards_seconds_bytes_and_links(captured: Captured) -> None:
    links = {("gpu", "cpu"): LinkCost(1e-5, 1e9, "modelled")}
    table = described.described_table(captured, BOARDS, links, SAMPLES, sgd(0.1, momentum=0.9))
    assert table.links == links
    assert table.samples == SAMPLES
    names = [layer.name for layer in table.layers]
    enter = table.layers[names.index("enter")]
    assert enter.params_nbytes == 4 * (144 * 24 + 24)
    assert enter.state_nbytes == enter.params_nbytes
    for id, there in BOARDS.items():
        cost = table.devices[id]
        assert cost.overhead_s == there.launch_s
        assert cost.label == "modelled"
        assert cost.execution == there.execution
    count = len(names)
    stages = captured.stage_graphs(
        range(1, count), [{}] * count, [SAMPLES], sgd(0.1, momentum=0.9), extras=()
    )
    kernels = layer_work(stages[names.index("enter")], SAMPLES).forward
    by_hand_s = BOARDS["gpu"].launch_s + gpu.kernels_s(BOARDS["gpu"], kernels)
    assert table.devices["gpu"].layers[names.index("enter")].forward_s == by_hand_s


def test_a_board_without_the_dtype_is_refused(captured: Captured) -> None:
    with pytest.raises(CostError, match="no peak for float16"):
        described.described_table(
            captured, {"a": board("gtx-1080-ti")}, {}, SAMPLES, sgd(0.1), "float16"
        )
