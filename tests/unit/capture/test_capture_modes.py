"""Every module trains in the mode that the user chose for it, as in plain torch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import found_devices
import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Env, Stages, compare, run, total
from torch import nn

from hetpipe.capture import Captured, EvalModeWarning
from hetpipe.capture.program import Program
from hetpipe.sdk.host.registry import discover_devices, get_backend, open_device

FOUND = [info for info in discover_devices()[0] if not info.capabilities.emulated]
DEVICES = list({info.backend: info.id for info in reversed(FOUND)}.values())
SIZES, SHARES = [8, 4], [8 / 12, 4 / 12]


class Net(nn.Module):
    """A backbone with batch norm and dropout, and a head with batch norm."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Conv2d(4, 4, 3)
        )
        self.head = nn.Linear(16, 5)
        self.norm = nn.BatchNorm1d(5)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.head(self.backbone(x).flatten(1))))


def _net(dropout: float = 0.0) -> Net:
    torch.manual_seed(0)
    net = Net(dropout)
    with torch.no_grad():
        net.backbone[1].running_mean.uniform_(-1, 1)
        net.backbone[1].running_var.uniform_(0.5, 2)
    return net


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3, 6, 6), torch.arange(12) % 5


def _run_on(device_id: str, program: Program, env: Mapping[tuple[str, str], torch.Tensor]) -> Env:
    """Run a program on the device."""
    inputs = [env[slot.key].contiguous().numpy() for slot in program.inputs]
    outputs = found_devices.run(open_device(device_id), program.graph, inputs)
    pairs = zip(program.outputs, outputs, strict=True)
    return {slot.key: torch.from_numpy(array) for slot, array in pairs}


def _check(
    net: nn.Module,
    captured: Captured,
    sizes: Sequence[int] = SIZES,
    tables: Sequence[Any] = (TABLES["core"],) * 2,
    execute: Callable[..., Env] = run,
) -> None:
    """Run one mini-batch and compare it with torch, which trains `net` in its current modes."""
    (x, y), shares = _batch(), [size / 12 for size in sizes]
    state = Stages(captured, captured.stage_graphs([1], tables, sizes, None), execute=execute)
    gradients = total(state.step((x, y), sizes, shares))
    lo, loss = 0, 0.0
    for size, share in zip(sizes, shares, strict=True):
        part = F.cross_entropy(net(x[lo : lo + size]), y[lo : lo + size]) * share
        part.backward()
        loss, lo = loss + float(part.detach()), lo + size
    assert state.loss == pytest.approx(loss, rel=1e-5)
    expected = {name: p.grad for name, p in net.named_parameters() if p.grad is not None}
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        compare(gradients[name], gradient, name)
    for name, buffer in net.named_buffers():
        if name in state.buffers:
            compare(state.buffers[name], buffer, name)


@pytest.mark.wide
@pytest.mark.parametrize("device_id", DEVICES)
def test_a_backbone_in_eval_mode_on_every_backend(device_id: str) -> None:
    """A backbone in eval mode uses neither batch statistics nor dropout, and its statistics stay
    unchanged."""
    net = _net()
    net.backbone.eval()
    tables = [get_backend(device_id.partition(":")[0]).decompositions()] * 2
    captured = Captured(net, F.cross_entropy, _batch())
    assert captured.updated_buffers == {f"norm.{name}" for name in net.norm.state_dict()} - {
        "norm.weight", "norm.bias"
    }  # fmt: skip
    _check(net, captured, tables=tables, execute=functools.partial(_run_on, device_id))


def test_dropout_in_eval_mode_stays_off() -> None:
    net = _net()
    net.backbone[3].eval()
    _check(net, Captured(net, F.cross_entropy, _batch()))


def test_dropout_elsewhere_stays_on() -> None:
    """With only the backbone in eval mode, the stages draw masks only for the last dropout."""
    net = _net(dropout=0.5)
    net.backbone.eval()
    captured = Captured(net, F.cross_entropy, _batch())
    stages = captured.stage_graphs([1], [{}, {}], [8], None)
    random = [{slot.role for slot in stage.passes[8].forward.inputs} for stage in stages]
    assert ["rng" in roles for roles in random] == [False, True]


@pytest.mark.slow
def test_a_model_in_eval_mode_warns_once_and_trains_as_in_torch() -> None:
    net = _net(dropout=0.5).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        captured = Captured(net, F.cross_entropy, _batch())
        _check(net, captured)
    texts = [str(one.message) for one in caught if one.category is EvalModeWarning]
    assert len(texts) == 1
    assert "Net is in eval mode" in texts[0]
    assert "model.train()" in texts[0]
    assert captured.updated_buffers == frozenset()


@pytest.mark.slow
def test_one_part_in_train_mode_does_not_warn() -> None:
    net = _net().eval()
    net.norm.train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        captured = Captured(net, F.cross_entropy, _batch())
    _check(net, captured)


@pytest.mark.slow
@pytest.mark.parametrize("change", [nn.Module.eval, nn.Module.train])
def test_a_mode_changed_after_capture_does_not_count(change: Callable[[nn.Module], Any]) -> None:
    """Validation between steps calls model.eval(); the capture may export sizes after it."""
    net = _net()
    net.backbone.eval()
    captured = Captured(net, F.cross_entropy, _batch())
    change(net)
    modes = [module.training for module in net.modules()]
    graphs = captured.stage_graphs([1], [{}, {}], [5, 7], None)
    assert len(graphs) == 2
    assert [module.training for module in net.modules()] == modes
    net.train()
    net.backbone.eval()
    _check(net, captured, [5, 7])


@pytest.mark.slow
def test_evaluation_is_in_eval_mode_throughout() -> None:
    net = _net(dropout=0.5)
    net.backbone.eval()
    captured = Captured(net, F.cross_entropy, _batch())
    x, y = _batch()
    graphs = captured.evaluation_graphs([1], [TABLES["core"]] * 2, SIZES)
    state = Stages(captured, graphs)
    state.step((x, y), SIZES, SHARES)
    net.eval()
    with torch.no_grad():
        assert state.loss == pytest.approx(float(F.cross_entropy(net(x), y)), rel=1e-5)


@pytest.mark.slow
def test_a_norm_without_momentum_is_accepted_in_eval_mode() -> None:
    """In train mode its factor depends on the number of batches, so the capture refuses it."""
    net = _net()
    net.backbone[1].momentum = None
    net.backbone.eval()
    _check(net, Captured(net, F.cross_entropy, _batch()))


def test_a_loss_that_is_a_module_keeps_its_mode() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.drop(out), y)

    loss_fn, net = Loss().eval(), _net()
    net.backbone.eval()
    captured = Captured(net, loss_fn, _batch())
    loss_fn.train()
    (stage,) = captured.stage_graphs([], [{}], [6], None)
    assert "rng" not in {slot.role for slot in stage.passes[6].forward.inputs}
    assert loss_fn.drop.training


def test_modes_are_part_of_the_fingerprint() -> None:
    net = _net()
    training = Captured(net, F.cross_entropy, _batch()).fingerprint
    net.backbone.eval()
    assert Captured(net, F.cross_entropy, _batch()).fingerprint != training
