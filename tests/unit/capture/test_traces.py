"""Equal pieces of a model are traced once, and each gets the programs that its own trace would
give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hetpipe as hp
from hetpipe.capture import Captured
from hetpipe.capture.passes.trace_cache import Traces
from hetpipe.capture.program import PassPrograms, Program
from hetpipe.sdk.graph import dump_graph


class Residual(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(self.norm(torch.relu(self.inner(x))) * self.scale, self.dropout)


def captured(depth: int, dropout: float = 0.0) -> Captured:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(dropout) for _ in range(depth)), nn.Linear(6, 3))
    return Captured(model, F.cross_entropy, (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)))


def rows(program: Program | None) -> Any:
    """Return everything in a program except node names."""
    if program is None:
        return None
    return dump_graph(program.graph), program.inputs, program.outputs


def programs(passes: PassPrograms) -> list[Any]:
    halves = passes.halves or (None, None)
    return [rows(p) for p in (passes.forward, passes.backward, *halves)]


@pytest.mark.wide
@pytest.mark.parametrize("dropout", [0.0, 0.1])  # each dropout draws different numbers
@pytest.mark.parametrize("recompute", ["none", "inputs", "min-cut"])
def test_a_copied_trace_equals_a_new_trace(
    recompute: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = captured(5, dropout)
    count = len(subject.layer_names)
    args: Any = (range(1, count), [{}] * count, [2], hp.optim.adam(), [recompute] * count, True)
    subject._identity._sources = None  # otherwise the graphs come from the disk
    once = subject.stage_graphs(*args)
    own = Traces()
    monkeypatch.setattr(Traces, "_first", property(lambda _: {}, lambda *_: None), raising=False)
    subject.traces = own
    each = subject.stage_graphs(*args)
    assert own.count == count
    for one, other in zip(once, each, strict=True):
        assert programs(one.passes[2]) == programs(other.passes[2])
        assert rows(one.update) == rows(other.update)
        assert rows(one.norm) == rows(other.norm)
        assert one.tied == other.tied


@pytest.mark.slow
def test_only_unlike_layers_are_traced() -> None:
    counts = []
    for depth in (4, 8):
        subject = captured(depth)
        subject._identity._sources = None
        names = subject.layer_names
        subject.stage_graphs(range(1, len(names)), [{}] * len(names), [2], hp.optim.adam())
        counts.append(subject.traces.count)
    assert counts[0] == counts[1] < 5
