"""Parametrised modules: weight norm and spectral norm, in torch's new and old form."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, check
from torch import nn
from torch.nn.utils import parametrizations

from hetpipe.capture import Captured

NORMS = [
    parametrizations.weight_norm,
    parametrizations.spectral_norm,
    nn.utils.weight_norm,
    nn.utils.spectral_norm,
]
Norm = Callable[[nn.Module], nn.Module]


def _net(norm: Norm) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the old forms
        return nn.Sequential(
            norm(nn.Conv2d(3, 4, 3)), nn.ReLU(), nn.Flatten(), norm(nn.Linear(64, 6)), nn.Tanh(),
            norm(nn.Linear(6, 5)),
        ).double()  # fmt: skip


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(12, 3, 6, 6).double(), torch.arange(12) % 5


def _captured(net: nn.Module) -> Captured:
    return Captured(net, F.cross_entropy, _batch())


@pytest.mark.wide
@pytest.mark.parametrize("norm", NORMS)
def test_parametrised_models_are_cut_like_other_models(norm: Norm) -> None:
    """The capture finds each parametrised layer, not one layer for the whole model."""
    layers = _captured(_net(norm)).layer_graph(4).layers
    assert [layer.name for layer in layers] == ["0", "3", "5"]
    for layer in layers:
        assert {name.partition(".")[0] for name in layer.parameters} == {layer.name}


@pytest.mark.wide
@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_and_buffers_equal_those_of_torch(norm: Norm, mode: bool) -> None:
    """Spectral norm updates its vectors in each forward in train mode, and never in eval mode."""
    net, twin = _net(norm), _net(norm)
    for module in (net[0], net[3], twin[0], twin[3]):
        module.train(mode)
    captured = _captured(net)
    graphs = captured.stage_graphs([1, 2], [TABLES["core"]] * 3, [8, 4], None)
    twin.train = lambda training=True: twin  # type: ignore[method-assign] # keep all modes
    check((twin, F.cross_entropy, _batch()), captured, graphs, [8, 4])


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_capture_leaves_the_model_unchanged(norm: Norm) -> None:
    net = _net(norm)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    _captured(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(type(module.weight) in (torch.Tensor, nn.Parameter) for module in (net[0], net[3]))
    net(_batch()[0]).sum().backward()


def test_a_parametrised_weight_may_have_two_readers() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = parametrizations.weight_norm(nn.Linear(6, 5))
            self.second = nn.Linear(5, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(self.second(torch.tanh(self.first(x))), self.first.weight)

    torch.manual_seed(0)
    net, batch = Tied().double(), (torch.randn(6, 6).double(), torch.arange(6) % 5)
    captured = Captured(net, F.cross_entropy, batch)
    graphs = captured.stage_graphs([1], [{}, {}], [6], None)
    check((copy.deepcopy(net), F.cross_entropy, batch), captured, graphs, [6])
