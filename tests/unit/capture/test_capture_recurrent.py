"""Recurrent networks: an LSTM layer is one operator, with any settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from capture_harness import TABLES, Stages, check
from torch import nn

from hetpipe.capture import Captured
from hetpipe.errors import CaptureError
from hetpipe.sdk.graph import core_decompositions, operator_name

SAMPLES, STEPS, FEATURES = 12, 3, 5
last_states = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 exports the last states of an LSTM with a wrong shape",
)


class Recurrent(nn.Module):
    """A model that uses all three results and takes the samples first."""

    def __init__(self, network: nn.Module, features: int) -> None:
        super().__init__()
        self.network = network
        self.head = nn.Linear(features, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.network.batch_first:
            y, (h, c) = self.network(x)
        else:
            y, (h, c) = self.network(x.transpose(0, 1))
            y = y.transpose(0, 1)
        return self.head(y).mean(1) + h.sum((0, 2))[:, None] + c.square().sum((0, 2))[:, None]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(4)
    x = torch.randn(SAMPLES, STEPS, FEATURES, dtype=torch.float64)
    return x, torch.randint(0, 2, (SAMPLES,))


def model(hidden: int = 4, **settings: Any) -> Recurrent:
    torch.manual_seed(3)
    network = nn.LSTM(FEATURES, hidden, **settings)
    features = (settings.get("proj_size") or hidden) * (1 + settings.get("bidirectional", False))
    return Recurrent(network, features).double()


@last_states
@pytest.mark.wide
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(
    "settings",
    [
        {"batch_first": True},
        {"bias": False},
        {"num_layers": 2, "bidirectional": True},
        {"bidirectional": True, "bias": False, "batch_first": True},
        {"proj_size": 2, "num_layers": 2},
    ],
    ids=str,
)
def test_every_form_equals_eager(settings: dict[str, Any], table: str) -> None:
    made = model(**settings)
    captured = Captured(made, F.cross_entropy, batch())
    graphs = captured.stage_graphs([], [TABLES[table]], [SAMPLES], None)
    check((made, F.cross_entropy, batch()), captured, graphs, [SAMPLES])


@pytest.mark.parametrize("biased", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=str)
def test_gradients_of_the_operator(given: tuple[bool, bool], biased: bool) -> None:
    """Check by finite differences, for y alone, for the last c alone, and for both."""
    torch.manual_seed(5)
    shapes = [(3, 2, 4), (2, 3), (2, 3), (12, 4), (12, 3), (12,)][: 6 if biased else 5]
    inputs = [torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    def chosen(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, last_c, *_ = torch.ops.hetpipe.lstm_layer(*args, *([] if biased else [None]))
        return tuple(each for each, wanted in zip((y, last_c), given, strict=True) if wanted)

    assert torch.autograd.gradcheck(chosen, inputs)


def _names(captured: Captured, table: Any) -> list[str]:
    (graphs,) = captured.stage_graphs([], [table], [SAMPLES], None)
    passes = graphs.passes[SAMPLES]
    assert passes.backward is not None
    nodes = [*passes.forward.graph.graph.nodes, *passes.backward.graph.graph.nodes]
    return [operator_name(node) for node in nodes if node.op == "call_function"]


@last_states
@pytest.mark.slow
def test_a_layer_is_one_operator_if_the_table_keeps_it() -> None:
    captured = Captured(model(num_layers=2), F.cross_entropy, batch())
    loop = core_decompositions(keep=["hetpipe.lstm", "hetpipe.lstm_backward"])
    for table, kept in (({}, "lstm_layer"), (loop, "lstm")):
        names = _names(captured, table)
        assert names.count(f"hetpipe.{kept}.default") == 2
        assert names.count(f"hetpipe.{kept}_backward.default") == 2
        assert len([name for name in names if "lstm" in name]) == 4
    assert not [name for name in _names(captured, core_decompositions()) if "lstm" in name]


def _dropout_gradients(sizes: list[int], step: int) -> dict[str, torch.Tensor]:
    # With as many steps as samples, the size of a dimension does not show which one it is.
    x = torch.randn(SAMPLES, SAMPLES, FEATURES, generator=torch.Generator().manual_seed(4)).double()
    made = model(num_layers=2, dropout=0.5)
    captured = Captured(made, F.cross_entropy, (x, batch()[1]))
    graphs = captured.stage_graphs([], [{}], sizes, None)
    weights = [size / SAMPLES for size in sizes]
    return Stages(captured, graphs).step((x, batch()[1]), sizes, weights, step)[0]


@last_states
@pytest.mark.slow
def test_dropout_between_layers_depends_only_on_the_sample() -> None:
    whole, parts, other = (_dropout_gradients(*how) for how in (([12], 0), ([8, 4], 0), ([12], 1)))
    for name, gradient in whole.items():
        torch.testing.assert_close(parts[name], gradient, rtol=0, atol=1e-6)
    weight = "network.weight_ih_l1"
    assert not torch.allclose(other[weight], whole[weight], atol=1e-3)


@pytest.mark.parametrize(
    "network",
    [
        nn.GRU(FEATURES, 4, 2, dropout=0.5, batch_first=True),
        nn.RNN(FEATURES, 4, 2, dropout=0.5, batch_first=True),
        nn.LSTM(FEATURES, 4, 2, dropout=0.5, batch_first=True, proj_size=2),
    ],
    ids=["gru", "rnn", "lstm_projected"],
)
def test_dropout_inside_decomposed_networks_is_refused(network: nn.Module) -> None:
    """torch's decompositions of these networks silently omit the dropout between layers."""

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.network(x)[0][:, -1]

    x, y = batch()
    with pytest.raises(CaptureError, match=r"dropout=0\.5 inside a recurrent network"):
        Captured(First(), F.cross_entropy, (x.float(), y))
