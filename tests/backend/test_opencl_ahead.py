"""OpenCL graphs compiled ahead: a later load uses the lowered graphs."""

from __future__ import annotations

import pytest
import torch
from found_devices import fetch
from hetpipe.backends.opencl import device as opencl
from opencl_devices import opencl_device, upload
from opencl_products import OPENCL
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from hetpipe.sdk.graph import canonical


def graph(together: frozenset[int] = frozenset()) -> fx.GraphModule:
    """Return a new copy of the graph, as a load receives it."""
    traced = canonical(make_fx(lambda x: (x.exp() + 1, x * 2))(torch.ones(4)))
    traced.graph.output_node().meta["together"] = together
    return traced


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that were lowered so far."""
    seen: list[fx.GraphModule] = []
    lower = opencl.lower

    def watched(graph: fx.GraphModule, *how: object) -> object:
        seen.append(graph)
        return lower(graph, *how)  # type: ignore[arg-type] # passed on

    monkeypatch.setattr(opencl, "lower", watched)
    return seen


def test_a_load_uses_the_graph_lowered_ahead(lowered: list[fx.GraphModule]) -> None:
    device = opencl_device(OPENCL[0])
    device.compile_ahead([graph()])
    executable = device.compile(graph())
    assert len(lowered) == 1
    x = torch.arange(4.0)
    buffers, events = upload(device, x)
    (first, second), event, _ = executable.run(buffers, after=events)
    torch.testing.assert_close(torch.from_numpy(fetch(device, first, [event])), x.exp() + 1)
    torch.testing.assert_close(torch.from_numpy(fetch(device, second, [event])), x * 2)
    device.compile(graph())
    assert len(lowered) == 2  # only one load uses a graph lowered ahead


def test_graphs_whose_results_share_memory_are_lowered_separately(
    lowered: list[fx.GraphModule],
) -> None:
    device = opencl_device(OPENCL[0])
    device.compile_ahead([graph()])
    device.compile(graph(frozenset({0, 1})))
    assert len(lowered) == 2
