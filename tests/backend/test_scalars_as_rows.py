"""0-d tensors, which torch treats as one row: every operator runs on them as in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import infos, opened, run, trace

from hetpipe.sdk.graph import graph_calls
from hetpipe.sdk.host.registry import get_backend

aten = torch.ops.aten
DEVICES = [info.id for info in infos()]
X, ZERO = torch.tensor(2.5), torch.tensor([0])

REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda x, _: (x.sum(0), x.sum(-1, keepdim=True)),
    "mean": lambda x, _: (x.mean(0), x.mean(-1)),
    "amax": lambda x, _: (x.amax(0), x.amin(-1), aten.amax(x, [0], True)),
    "prod": lambda x, _: (x.prod(0), x.prod(-1)),
    "any": lambda x, _: (x.bool().any(0), x.bool().any(-1)),
    "all": lambda x, _: (x.bool().all(0), x.bool().all(-1)),
    "argmax": lambda x, _: (x.argmax(0), x.argmin(-1)),
    "max": lambda x, _: (*x.max(0), *x.min(-1)),
    "var": lambda x, _: (x.var(0, correction=0), *torch.var_mean(x, -1, correction=0)),
    "cumsum": lambda x, _: (x.cumsum(0), x.cumsum(-1)),
    "softmax": lambda x, _: (x.softmax(0), x.log_softmax(-1), x.logsumexp(0)),
    "squeeze": lambda x, _: (x.squeeze(0) + 1, aten.squeeze.dims(x, [0]) * 2),
}
INDEXED: dict[str, Callable[..., Any]] = {
    "index_select": lambda x, i: (x.index_select(0, i), x.index_select(-1, i[0]) * 2),
    "index_add": lambda x, i: x.index_add(0, i, x),
    "gather": lambda x, i: (x.gather(0, i), x.gather(-1, i[0]), i.gather(0, i[0])),
    "scatter": lambda x, i: (aten.scatter.value(x, 0, i, 3.0), x.scatter_add(0, i[0], x)),
}
CASES = REDUCTIONS | INDEXED


@pytest.mark.wide
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("device_id", DEVICES)
def test_a_0d_tensor_is_one_row(device_id: str, name: str) -> None:
    device = opened(device_id)
    table = get_backend(device.info.backend).decompositions()
    graph = trace(CASES[name], [X, ZERO], table)
    if any(device.supports(node) is not None for node in graph_calls(graph)):
        assert name == "scatter", "only OpenCL lacks an operator, and only this one"
        pytest.skip("the device refuses the operator when planning")
    expected = CASES[name](X, ZERO)
    expected = expected if isinstance(expected, tuple) else (expected,)
    found = run(device, graph, [X.numpy(), ZERO.numpy()])
    for array, tensor in zip(found, expected, strict=True):
        assert array.shape == tuple(tensor.shape)
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("device_id", DEVICES)
def test_a_fill_accepts_any_tensor_of_one_element(device_id: str, shape: tuple[int, ...]) -> None:
    """The operators are not decomposed, because torch's own fill accepts only a 0-d tensor."""
    device = opened(device_id)
    graph = trace(lambda x, v: aten.fill(x, v) + 1, [torch.zeros(2, 3), X], {})
    value = list(graph.graph.nodes)[1]
    value.meta["val"] = value.meta["val"].reshape(shape)
    found = run(device, graph, [np.zeros((2, 3), np.float32), np.full(shape, 2.5, np.float32)])
    np.testing.assert_array_equal(found[0], np.full((2, 3), 3.5))


@pytest.mark.parametrize("device_id", DEVICES)
def test_a_fill_with_several_elements_is_refused_when_planning(device_id: str) -> None:
    device = opened(device_id)
    graph = trace(lambda x, v: aten.fill(x, v), [torch.zeros(2, 3), X], {})
    value, fill = list(graph.graph.nodes)[1:3]
    value.meta["val"] = torch.empty(3, device="meta")
    reason = device.supports(fill)
    assert reason == "a fill takes one element, but its tensor has 3"
