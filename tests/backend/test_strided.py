"""`as_strided`, which torch's decompositions use for views of row-major tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from found_devices import infos, opened, run, trace

from hetpipe.sdk.graph import graph_calls
from hetpipe.sdk.host.registry import get_backend

aten = torch.ops.aten
DEVICES = [info.id for info in infos()]
X = torch.arange(24.0).reshape(2, 3, 4)


def strided(x: torch.Tensor) -> Any:
    y = (x * 2).contiguous()
    return (
        aten.as_strided(y, [24], [1]) + 1,
        aten.as_strided(y, [3, 4], [4, 1], 12),
        aten.as_strided(y, [2, 4, 3], [12, 1, 4]) * 3,
        aten.as_strided(y, [5, 4], [2, 1], 1),  # rows overlap
        aten.as_strided(y, [], [], 5),
    )


@pytest.mark.parametrize("device_id", DEVICES)
def test_as_strided_runs_on_every_device(device_id: str) -> None:
    device = opened(device_id)
    graph = trace(strided, [X], get_backend(device.info.backend).decompositions())
    assert [device.supports(node) for node in graph_calls(graph) if "strided" in str(node)] == [
        None
    ] * 5
    for array, expected in zip(run(device, graph, [X.numpy()]), strided(X), strict=True):
        np.testing.assert_array_equal(array, expected.numpy())


@pytest.mark.parametrize("device_id", DEVICES)
def test_as_strided_treats_a_view_as_row_major(device_id: str) -> None:
    """A backend need not follow the strides of tensors other than inputs and outputs."""
    device = opened(device_id)
    graph = trace(lambda x: aten.permute(x, [0, 2, 1]) + 0, [X], {})
    (permuted,) = graph.graph.find_nodes(op="call_function", target=aten.permute.default)
    (last,) = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    with graph.graph.inserting_before(last):
        view = graph.graph.call_function(aten.as_strided.default, (permuted, [2, 4, 3], [12, 3, 1]))
    view.meta["val"] = permuted.meta["val"]
    last.replace_input_with(permuted, view)
    (found,) = run(device, graph, [X.numpy()])
    np.testing.assert_array_equal(found, X.permute(0, 2, 1).numpy())


@pytest.mark.parametrize("device_id", [i for i in DEVICES if not i.startswith("pytorch")])
def test_reading_past_the_tensor_is_refused_when_planning(device_id: str) -> None:
    graph = trace(lambda x: aten.as_strided(x, [5], [6]), [torch.zeros(100)], {})
    x, call = list(graph.graph.nodes)[:2]
    x.meta["val"] = torch.empty(24, device="meta")
    reason = opened(device_id).supports(call)
    assert reason == "as_strided reaches element 24 of a tensor that has 24"
