"""Tensors without dimensions: torch allows reductions and indexing along dimension 0 or -1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from found_devices import infos, opened, run, trace

from hetpipe.sdk.graph import graph_calls
from hetpipe.sdk.host.registry import get_backend

IDS = [info.id for info in infos()]
ALONG: dict[str, Callable[[torch.Tensor, int], Any]] = {
    "sum": lambda x, d: (x.sum(d), x.sum([d], keepdim=True), x.sum()),
    "mean": lambda x, d: (x.mean(d), x.mean([d], keepdim=True), x.mean()),
    "prod": lambda x, d: (x.prod(d), x.prod()),
    "extremes": lambda x, d: (x.amax(d), x.amin([d], keepdim=True), x.max(), x.min()),
    "extremes with places": lambda x, d: (*x.max(d), *x.min(d, keepdim=True)),
    "places": lambda x, d: (x.argmax(d), x.argmin(d), x.argmax()),
    "any and all": lambda x, d: ((x > 0).any(d), (x > 9).all(d), (x > 0).any(), (x > 0).all()),
    "variance": lambda x, d: (x.var(d, correction=0), *torch.var_mean(x, d, correction=0)),
    "running": lambda x, d: (x.cumsum(d), x.cumprod(d)),
    "softmax": lambda x, d: (x.softmax(d), x.log_softmax(d), x.logsumexp(d)),
    "norms": lambda x, d: (torch.linalg.vector_norm(x, 2, d), torch.linalg.vector_norm(x, 1)),
    "flips": lambda x, d: (x.flip([]), x.roll(1), x.squeeze(d), x.unsqueeze(d)),
    "places along": lambda x, d: (x.index_select(d, (x > 99).to(torch.int64).reshape(1)),),
    "sorting": lambda x, d: (*torch.sort(x, d), x.median(d)[0], torch.topk(x, 1, d)[0]),
}


@pytest.mark.wide
@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("name", ALONG)
@pytest.mark.parametrize("device_id", IDS)
def test_operators_along_a_missing_dimension(device_id: str, name: str, dim: int) -> None:
    device = opened(device_id)

    def fn(x: torch.Tensor) -> Any:
        return ALONG[name](x, dim)

    x = torch.tensor(2.5)
    graph = trace(fn, [x], get_backend(device.info.backend).decompositions())
    refused = [reason for node in graph_calls(graph) if (reason := device.supports(node))]
    if refused and device.info.backend == "numpy":
        pytest.skip(refused[0])
    assert not refused
    for array, tensor in zip(run(device, graph, [x.numpy()]), fn(x), strict=True):
        assert array.dtype.name == str(tensor.dtype)[6:]
        np.testing.assert_allclose(array, tensor.numpy(), rtol=1e-6)


@pytest.mark.wide
@pytest.mark.parametrize("device_id", IDS)
def test_writes_into_a_tensor_without_dimensions(device_id: str) -> None:
    """An implementation that divides by the size of the missing dimension fails here."""
    device = opened(device_id)

    def fn(x: torch.Tensor, i: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.index_add(0, i, s), x.index_copy(0, i, s), x.gather(0, i), x.scatter_add(0, i, s)

    inputs = torch.tensor(1.5), torch.tensor(0), torch.tensor(-0.25)
    graph = trace(fn, inputs, get_backend(device.info.backend).decompositions())
    if device.info.backend == "numpy" and any(map(device.supports, graph_calls(graph))):
        pytest.skip("numpy has few writes")
    for array, tensor in zip(
        run(device, graph, [each.numpy() for each in inputs]), fn(*inputs), strict=True
    ):
        np.testing.assert_array_equal(array, tensor.numpy())
