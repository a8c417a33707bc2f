"""Kernels over one element, which compute everything before the loop along a row."""

from __future__ import annotations

import pytest
import torch
from found_devices import infos, opened, run, trace

from hetpipe.sdk.host.registry import get_backend

DEVICES = [info.id for info in infos() if info.backend == "opencl"]


@pytest.mark.parametrize("device_id", DEVICES)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scalar_is_not_read_by_the_kernel_that_stores_it(
    device_id: str, shape: tuple[int, ...]
) -> None:
    """Two uses make the kernel store the root;

    a sum in the same kernel must not read it from memory.
    """

    def scaled(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        root = torch.sqrt(a)
        return x * (root / (root + 1))

    torch.manual_seed(0)
    inputs = [torch.randn(3, 5), torch.full(shape, 4.0)]
    graph = trace(scaled, inputs, get_backend("opencl").decompositions())
    (found,) = run(opened(device_id), graph, [tensor.numpy() for tensor in inputs])
    torch.testing.assert_close(torch.from_numpy(found), scaled(*inputs))
