"""Autocast in a captured model: which layers use narrow types, and what stays unchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hetpipe.capture import Captured
from hetpipe.capture.precision import Precision
from hetpipe.capture.program import GRAD, PARAM, SAVED, StageGraphs
from hetpipe.sdk.graph import graph_calls, operator_name

PRODUCTS = {"aten.addmm.default", "aten.mm.default", "aten.linear.default"}
HALF = Precision("bfloat16")


class Guarded(nn.Module):
    """A model with its own casts and a region without autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x)).float()
        with torch.autocast("cpu", enabled=False):
            x = torch.tanh(self.second(x))
        return self.third(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.entry, self.layer, self.last = nn.Linear(6, 8), kind(8, 8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(torch.tanh(self.entry(x)).unsqueeze(0))[0][0])


def stage(model: nn.Module, precision: Precision = HALF) -> StageGraphs:
    batch = (torch.randn(4, 6), torch.tensor([0, 1, 2, 3]))
    captured = Captured(model, F.cross_entropy, batch)
    narrow = Captured(model, F.cross_entropy, batch, precision)
    names = [[layer.name for layer in c.layer_graph(4).layers] for c in (captured, narrow)]
    assert names[0] == names[1]
    assert captured.fingerprint != narrow.fingerprint
    return narrow.stage_graphs([], [{}], [4], None)[0]


def dtypes(graphs: StageGraphs) -> dict[str, set[str]]:
    """Return the dtypes of each layer's products."""
    found: dict[str, set[str]] = {}
    for node in graph_calls(graphs.passes[4].forward.graph):
        name = operator_name(node)
        if name in PRODUCTS or name.startswith("hetpipe."):
            value: Any = node.meta["val"]
            first = value[0] if isinstance(value, tuple) else value
            found.setdefault(node.meta["layer"], set()).add(str(first.dtype).removeprefix("torch."))
    return found


def test_parameters_and_their_gradients_stay_wide() -> None:
    graphs = stage(Guarded())
    passes = graphs.passes[4]
    assert passes.backward is not None
    slots = (*passes.forward.inputs, *passes.backward.outputs)
    assert {slot.dtype for slot in slots if slot.role in (PARAM, GRAD)} == {"float32"}
    saved = [slot.dtype for slot in passes.forward.outputs if slot.role == SAVED]
    assert "bfloat16" in saved


def test_a_region_without_autocast_stays_wide() -> None:
    """Its operators belong to the layer before it: the export drops modules inside."""
    found = dtypes(stage(Guarded()))
    assert found == {"first": {"bfloat16", "float32"}, "third": {"bfloat16"}}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay_wide(kind: type[nn.RNNBase]) -> None:
    found = dtypes(stage(Recurrent(kind)))
    assert found.pop("layer") == {"float32"}
    assert found == {"entry": {"bfloat16"}, "last": {"bfloat16"}}
