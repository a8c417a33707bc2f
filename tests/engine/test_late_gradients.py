"""Gradients without accumulators, created by the only backward and released by the update."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from models import MLP
from torch import nn

from hetpipe import optim
from hetpipe.capture import Captured
from hetpipe.capture.passes.late_gradients import drop_zeros, first_gradients, late_names
from hetpipe.capture.program import GRAD, PARAM, SAVED, StageGraphs
from hetpipe.schedule.action import Op
from hetpipe.sdk.host.registry import decompositions_of, discover_devices, open_device
from hetpipe.wire.messages import Keep
from hetpipe.worker.stage import Pass, Stage

ROWS = 6
BACKENDS = ("numpy", "opencl", "pytorch")
DEVICES = list({info.backend: info.id for info in reversed(discover_devices(BACKENDS)[0])}.values())
"""The first computing device of each backend."""


class Pooled(nn.Module):
    """A convolution, a max pooling, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(36, 36)
        self.last = nn.Linear(36, 36)
        self.last.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(torch.tanh(self.conv(x)), 2).flatten(1)
        return self.last(F.gelu(self.linear(hidden)))


def capture(
    model: nn.Module, *shape: int, halves: bool = False, table: Any = MappingProxyType({})
) -> tuple[Captured, StageGraphs]:
    torch.manual_seed(0)
    batch = (torch.randn(ROWS, *shape), torch.randint(4, (ROWS,)))
    captured = Captured(model, F.cross_entropy, batch)
    (graphs,) = captured.stage_graphs(
        [], [table], [ROWS], optim.adam(lr=0.1), halves=halves, extras=("norm",)
    )
    return captured, graphs


@pytest.mark.parametrize("halves", [False, True])
def test_first_gradients_have_no_accumulators_and_no_zeros(halves: bool) -> None:
    _, graphs = capture(MLP(), 20, halves=halves)
    passes = graphs.passes[ROWS]
    assert passes.backward is not None
    assert graphs.update is not None
    backwards = passes.halves or (passes.backward,)
    firsts = [first_gradients(program) for program in backwards]
    names = {slot.name for slot in passes.backward.outputs if slot.role == GRAD}
    assert names
    assert late_names(firsts) == names
    for first, program in zip(firsts, backwards, strict=True):
        assert first.outputs == program.outputs
        assert not [slot for slot in first.inputs if slot.role == GRAD]
    update = drop_zeros(graphs.update, names)
    assert {slot.role for slot in graphs.update.outputs} - {s.role for s in update.outputs} == {
        GRAD
    }
    assert {slot.role for slot in update.inputs} == {slot.role for slot in graphs.update.inputs}


def test_a_gradient_of_two_parameters_keeps_an_accumulator() -> None:
    """Two biases added to the same tensor share one gradient."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = (nn.Parameter(torch.zeros(4)) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x + (self.one + self.other))

    _, graphs = capture(Twice(), 4)
    backward = graphs.passes[ROWS].backward
    assert backward is not None
    first = first_gradients(backward)
    assert [slot.name for slot in first.inputs if slot.role == GRAD] == ["other"]
    assert late_names([first]) == {"one"}


def test_a_poolings_input_is_not_saved() -> None:
    _, graphs = capture(Pooled(), 3, 8, 8)
    saved = [s for s in graphs.passes[ROWS].forward.outputs if s.role == SAVED]
    # The only one is tanh's result, for tanh's derivative. A rectifier would save only a mask.
    assert sum(slot.shape == (ROWS, 4, 6, 6) for slot in saved) == 1


class Training:
    """Training of a model on one device as one stage."""

    def __init__(self, device_id: str, late: bool, halves: bool = False) -> None:
        torch.manual_seed(0)
        device = open_device(device_id)
        table = decompositions_of(device.info.backend)
        self.captured, graphs = capture(Pooled(), 3, 8, 8, halves=halves, table=table)
        self.names = [name for name, _ in Pooled().named_parameters()]
        values = {**self.captured.parameters, **self.captured.buffers}
        keep = Keep(updates=(0,), late_gradients=late)
        self.stage = Stage(device, graphs, np.zeros, keep)
        for key in self.stage.store.missing():
            self.stage.put(key, values[key[1]])
        self.halves = halves

    def forward(self, seed: int, microbatch: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, 3, 8, 8, generator=generator)
        y = torch.randint(4, (ROWS,), generator=generator)
        self.feed = self.captured.leaves(x, y)
        self.stage.run(Pass(Op.FORWARD, microbatch, ROWS, self.feed))

    def backward(self, microbatch: int = 0) -> None:
        ops = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if self.halves else (Op.BACKWARD,)
        for op in ops:
            self.stage.run(Pass(op, microbatch, ROWS, self.feed, loss_tangent=1.0))

    def values(self, role: str) -> dict[str, Any]:
        return {name: self.stage.get((role, name)) for name in self.names}


def same(one: Training, other: Training, role: str) -> None:
    for name, value in one.values(role).items():
        np.testing.assert_allclose(other.values(role)[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("device_id", DEVICES)
def test_late_gradients_change_no_value(device_id: str, halves: bool) -> None:
    """The steps have one micro-batch, then three, then a forward whose gradients are dropped."""
    late, kept = Training(device_id, True, halves), Training(device_id, False, halves)
    for step in range(3):
        for training in (late, kept):
            assert not any(value.any() for value in training.values(GRAD).values())
            training.forward(step)
            training.backward()
        same(kept, late, GRAD)
        assert late.stage.square(0.5) == pytest.approx(kept.stage.square(0.5), rel=1e-5)
        for training in (late, kept):
            training.stage.update({"lr": 0.1}, 1.0)
        same(kept, late, PARAM)
    for training in (late, kept):
        for microbatch in range(3):
            training.forward(10 + microbatch, microbatch)
        for microbatch in (1, 2, 0):
            training.backward(microbatch)
    same(kept, late, GRAD)
    for training in (late, kept):
        training.stage.update({"lr": 0.1}, 0.5)
        training.forward(20)
        training.backward()
        training.stage.undo()
        assert not any(value.any() for value in training.values(GRAD).values())
        training.stage.update({"lr": 0.1}, 1.0)  # Adam's momentum moves the weights
    same(kept, late, PARAM)
